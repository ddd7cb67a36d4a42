"""Formats and patterns of JSON Schema."""
