"""Code around the engine that uses Redis, S3 and text; and `worker.train`."""
