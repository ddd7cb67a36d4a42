"""Requests to addresses that customers name."""
