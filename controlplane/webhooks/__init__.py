"""Tell a tenant's servers and people what happened: webhooks and mails about events."""
