"""Operators' service keys: the credentials of scripts that use /ops/v1."""
