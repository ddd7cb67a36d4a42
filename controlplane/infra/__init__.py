"""Redis, S3, mail, locks, ciphers and threads; nothing of tenants."""
