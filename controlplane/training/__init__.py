"""Data sets, training runs and schedules."""
