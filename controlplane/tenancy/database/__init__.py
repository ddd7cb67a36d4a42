"""Row-level security between tenants in PostgreSQL; docs/security.md says what it guarantees.

base        the database backend: it sends the scope with every statement
operations  the migration operations that protect a tenant table
ownership   migrations run as the owner of the tables, all else as a role that owns nothing
checks      a system check that every tenant table is protected
"""
