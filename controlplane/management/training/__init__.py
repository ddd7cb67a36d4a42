"""The API of training: datasets, runs, and schedules."""
