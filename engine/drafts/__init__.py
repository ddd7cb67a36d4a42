"""Drafts: guesses of an answer's next tokens, verified in one pass (docs/speculation.md)."""
