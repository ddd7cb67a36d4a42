"""Saved states, kept adapters and folders of a run that trains."""
