"""The engine in a process of its own, and the connection to it."""
