"""The database's own wall between tenants: docs/security.md says what it holds.

base        the backend: every statement carries the scope it runs in
operations  what makes a table a tenant's, in a migration
ownership   migrations run as the owner of the tables, all else as a role that owns nothing
checks      that no tenant table was forgotten
"""
