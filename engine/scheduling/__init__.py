"""Chooses the sequences of the next step, and takes the pages that they need."""
