"""Webhooks, what is delivered to them, and mails about the same events."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controlplane.events.outbox.models import OutboxEvent
from controlplane.tenancy.scoping import TenantModel
from controlplane.tenants.models import Membership, User


class WebhookEndpoint(TenantModel):
    """An address of the tenant's that receives events."""

    url = models.CharField(max_length=2000)
    description = models.CharField(max_length=200, blank=True)
    #: Values of `outbox.models.EventType`.
    event_types = models.JSONField(default=list)
    is_enabled = models.BooleanField(default=True)
    #: Why the platform disabled it; empty: it did not.
    disabled_reason = models.CharField(max_length=200, blank=True)
    #: Encrypted: `controlplane.webhooks.signing`.
    sealed_secret = models.BinaryField()
    #: The secret before the last rotation, and the time until which it signs, too.
    old_sealed_secret = models.BinaryField(null=True)
    old_secret_until = models.DateTimeField(null=True)
    #: Time since which every attempt failed; None: the last one did not.
    failing_since = models.DateTimeField(null=True)
    #: Time of the last attempt: the webhook that waited longest is next.
    tried_at = models.DateTimeField(null=True)
    #: End of the lease of the process that calls it.
    lease_until = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"], name="webhooks_of_tenant")]

    def __str__(self) -> str:
        return self.url


class WebhookDelivery(TenantModel):
    """One event for one webhook."""

    class Status(models.TextChoices):
        PENDING = "pending"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"  # its webhook was disabled first

    endpoint = models.ForeignKey(
        WebhookEndpoint, on_delete=models.CASCADE, related_name="deliveries"
    )
    event = models.ForeignKey(OutboxEvent, on_delete=models.CASCADE, related_name="+")
    status = models.CharField(max_length=16, choices=Status, default=Status.PENDING)
    #: Number of attempts since it was made, or last redelivered.
    attempts = models.PositiveIntegerField(default=0)
    next_attempt_at = models.DateTimeField(null=True)
    attempted_at = models.DateTimeField(null=True)
    #: The last attempt: the answer's status or the error, and its duration.
    response_status = models.PositiveSmallIntegerField(null=True)
    error = models.CharField(max_length=200, blank=True)
    took_ms = models.PositiveIntegerField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["endpoint", "event"], name="webhook_delivery_once")
        ]
        indexes = [
            models.Index(
                fields=["endpoint", "next_attempt_at"],
                condition=Q(status="pending"),
                name="webhook_deliveries_due",
            ),
            models.Index(fields=["tenant", "endpoint", "id"], name="webhook_deliveries_newest"),
        ]

    def __str__(self) -> str:
        return f"{self.event_id} to {self.endpoint_id}"


class MailChoice(TenantModel):
    """The events that a member wants by mail; without a row the role's default applies."""

    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="+")
    event_types = models.JSONField(default=list)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["membership"], name="mail_choice_once")]

    def __str__(self) -> str:
        return str(self.membership_id)


class EventMail(TenantModel):
    """One event's mail to one person."""

    event = models.ForeignKey(OutboxEvent, on_delete=models.CASCADE, related_name="+")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    attempts = models.PositiveSmallIntegerField(default=0)
    #: None: it was sent, or given up.
    next_attempt_at = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["event", "user"], name="event_mail_once")]
        indexes = [
            models.Index(
                fields=["next_attempt_at"],
                condition=~Q(next_attempt_at=None),
                name="event_mails_due",
            ),
            models.Index(fields=["tenant", "created_at"], name="event_mails_by_day"),
        ]

    def __str__(self) -> str:
        return f"{self.event} to {self.user.email}"
