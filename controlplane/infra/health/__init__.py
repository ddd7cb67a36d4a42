"""Whether processes are alive, and the servers that they need are ready."""
