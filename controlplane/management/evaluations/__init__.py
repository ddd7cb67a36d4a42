"""The API of evaluations, gates, and their reports."""
