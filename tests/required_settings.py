"""Settings that have no default, for what connects to nothing: types, documents, imports."""

REQUIRED = {
    "LORIKEET_SECRET_KEY": "of nobody",
    "LORIKEET_KEY_PEPPER": "of nobody",
    "DATABASE_URL": "postgresql://lorikeet_app@nowhere.invalid/lorikeet",
    "REDIS_URL": "redis://nowhere.invalid/0",
    "S3_ENDPOINT_URL": "http://nowhere.invalid",
    "S3_ACCESS_KEY_ID": "of nobody",
    "S3_SECRET_ACCESS_KEY": "of nobody",
}
