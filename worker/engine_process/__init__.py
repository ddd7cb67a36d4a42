"""Runs the engine in a process of its own, and connects to it."""
