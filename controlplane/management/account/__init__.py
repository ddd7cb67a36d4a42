"""The API of an organization: its people, limits, usage, and audit trail."""
