"""OpenAI's Responses API, without state: every request brings all that it refers to."""
