"""Text and token ids: templates, tokenizer, stop strings, tool calls."""
