"""The request log: recording, stored content, retention."""
