"""/ops/v1 and /admin: what the platform's operators see and change."""
