"""Pages: their owners, the prefixes that they keep, and the order of their eviction."""
