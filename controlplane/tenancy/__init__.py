"""What keeps tenants apart: scope, row-level security, public ids."""
