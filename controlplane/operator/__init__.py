"""/ops/v1 and /admin: the platform's operators see and change all tenants here."""
