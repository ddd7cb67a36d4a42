"""Handling of HTTP requests: their lines, threads, and pages of errors."""
