"""Delete adapters, datasets and tenants for good, with what belongs to them in every app."""
