"""The inspector: probes adapters on a worker, and describes their weights."""
