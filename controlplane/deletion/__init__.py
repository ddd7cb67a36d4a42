"""Delete adapters, datasets and tenants, with everything that belongs to them in every app."""
