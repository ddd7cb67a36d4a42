"""Which workers hold an adapter, and which should."""
