"""Files that tenants upload or that the platform makes for them."""
