"""Tinker's addresses: what its client expects behind a base URL, under a tenant's key."""
