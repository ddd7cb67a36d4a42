"""Compute PEFT's results for an adapter, and examine its weights."""
