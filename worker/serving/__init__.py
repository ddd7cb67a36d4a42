"""Requests from Redis to answers: pulled, begun in the engine, streamed, ended."""
