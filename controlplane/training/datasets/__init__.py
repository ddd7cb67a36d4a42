"""Datasets: their versions, checks, reports, and the sources they are pulled from."""
