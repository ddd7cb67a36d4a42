"""The API of adapters and their versions."""
