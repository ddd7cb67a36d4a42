"""The workers that hold an adapter, and those that should."""
