"""Adapters and base models: configs, tensors, whether they fit, and checks of uploaded files."""
