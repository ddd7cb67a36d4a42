"""The rewards of a run's sampled answers, between its trainer and the graders above."""
