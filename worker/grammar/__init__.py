"""Tries grammars and checks answers, in processes that can be killed."""
