"""The base model: its config, its weights and its rotary embedding."""
