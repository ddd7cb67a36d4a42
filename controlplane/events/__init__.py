"""Events: the audit trail of changes, and the outbox from which webhooks and mails are sent."""
