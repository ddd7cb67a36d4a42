"""The control plane's side of Redis: admission, replies, reaping, usage records."""
