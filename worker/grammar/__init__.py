"""Grammars tried, and answers checked, in processes that can be killed."""
