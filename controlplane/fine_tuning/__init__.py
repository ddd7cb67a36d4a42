"""Training runs as OpenAI's fine-tuning jobs: over files, with a file of their metrics."""
