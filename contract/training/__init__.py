"""Training: a run's job, the rows it learns, and their formats."""
