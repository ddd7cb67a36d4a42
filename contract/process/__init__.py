"""Child processes and logs: sealed children, their environment, lines that are read from them."""
