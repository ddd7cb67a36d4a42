"""Checks that processes are alive, and that the servers they need are ready."""
