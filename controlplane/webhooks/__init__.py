"""Webhooks and mails that tell a tenant's servers and people about events."""
