"""Training clients: a tenant's own loop sends each pass and each step of its adapter."""
