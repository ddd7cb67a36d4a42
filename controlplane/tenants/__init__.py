"""Tenants, people, roles and API keys."""
