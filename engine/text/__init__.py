"""Text and token ids: chat templates, tokenizer, decoding, stop strings.

The library and the worker use the same code, so that they give the same answers.
"""
