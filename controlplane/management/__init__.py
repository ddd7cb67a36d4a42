"""/api/v1: the API by which tenants manage themselves."""
