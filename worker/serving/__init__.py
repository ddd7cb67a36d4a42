"""Pulls requests from Redis, runs them in the engine, and streams and ends their answers."""
