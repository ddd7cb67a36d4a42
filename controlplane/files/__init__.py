"""Files that tenants upload or get: their rows, bytes and ends."""
