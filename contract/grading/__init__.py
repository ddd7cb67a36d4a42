"""Grading: the rewards of sampled answers, in the form of OpenAI's graders."""
