"""Lorikeet's command line, on the public API alone: it imports nothing else of this repository."""

__version__ = "0.1.0"
