"""Limits, budgets and quotas of tenants and keys."""
