"""The queue in Redis between gateways and workers: its keys and its scripts."""
