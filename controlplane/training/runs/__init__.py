"""Training runs: from the request to the published version."""
