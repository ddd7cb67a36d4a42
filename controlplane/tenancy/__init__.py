"""The isolation of tenants: scope, row-level security, public ids."""
