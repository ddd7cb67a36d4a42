"""Effects around the engine: Redis, S3, text, usage; and `worker.train`."""
