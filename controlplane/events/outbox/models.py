"""Events, until they are deleted; `controlplane.webhooks` delivers them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from controlplane.tenancy.public_ids import PublicIdModel


class EventType(models.TextChoices):
    """The types of events; the names are part of the API."""

    VERSION_READY = "version.ready", "a version passed its checks"
    VERSION_REJECTED = "version.rejected", "a version failed its checks"
    VERSION_PROMOTED = "version.promoted", "a version went live"
    VERSION_ROLLED_BACK = "version.rolled_back", "an earlier version went live again"
    VERSION_GATED = "version.gated", "the gate decided about a version"
    TRAINING_RUN_SUCCEEDED = "training_run.succeeded", "a training run made a version"
    TRAINING_RUN_FAILED = "training_run.failed", "a training run failed"
    SCHEDULE_MISSED = "schedule.missed", "a schedule's slot was missed"
    MORNING_READY = "morning.ready", "what changed last night can be read"
    BUDGET_REACHED = "budget.reached", "a budget's limit is reached"
    #: These two concern one endpoint only: nobody can choose them.
    WEBHOOK_TEST = "webhook.test", "somebody tries a webhook"
    WEBHOOK_DISABLED = "webhook.disabled", "a webhook failed for too long"


#: Types that people and webhooks can choose.
CHOOSABLE = tuple(
    type for type in EventType if type not in (EventType.WEBHOOK_TEST, EventType.WEBHOOK_DISABLED)
)


class OutboxEvent(PublicIdModel):
    """One thing that happened, as receivers read it. Never changed."""

    PREFIX: ClassVar[str] = "evt_"

    type = models.CharField(max_length=32, choices=EventType)
    data = models.JSONField(default=dict)
    #: Time when its deliveries and mails were made, which happens once.
    fanned_out_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["created_at"],
                condition=models.Q(fanned_out_at=None),
                name="outbox_to_fan_out",
            ),
            models.Index(fields=["created_at"], name="outbox_by_age"),
        ]
