"""Runs of rewards: answers are sampled by an engine over the trainer's weights, then graded."""
