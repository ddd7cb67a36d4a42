"""What a run stores while it trains: saved states, kept adapters, and folders."""
