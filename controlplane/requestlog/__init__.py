"""The log of requests, its keeping and its forgetting."""
