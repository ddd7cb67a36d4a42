"""Training by single calls: a caller's own loop sends each pass and each step of its adapter."""
