"""Checks of an installation, with advice for each problem.

examination  findings, and how checks run: at the same time, each for a limited time
servers      PostgreSQL, Redis, the object store, clocks
platform     base models, workers, processes, the pepper
machine      mail, disks, settings
"""
