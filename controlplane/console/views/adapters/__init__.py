"""Pages of adapters, their versions, and aliases."""
