"""Evaluations: suites of cases, their runs on models, comparisons of runs, and the gate."""
