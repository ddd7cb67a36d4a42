"""Adapters and their versions: uploaded, checked, resolved by name."""
