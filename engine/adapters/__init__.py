"""Adapters: read and checked, laid out in tiles and pages, kept on host and device."""
