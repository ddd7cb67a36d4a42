"""Rewards: the graders of runs by reinforcement, from what evaluations have."""
