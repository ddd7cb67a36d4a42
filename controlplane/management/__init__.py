"""/api/v1: what a tenant manages by API."""
