"""The audit trail: who changed what, and from where. Rows are added and never changed."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from typing import ClassVar

from django.db import models

from controlplane.tenancy.scoping import TenantModel


class AuditEvent(TenantModel):
    """One change. Each tenant has a chain of events, and the platform itself has one.

    Only `controlplane.events.audit.services` writes events.
    """

    class ActorType(models.TextChoices):
        API_KEY = "api_key"
        SERVICE_KEY = "service_key"
        USER = "user"
        ANONYMOUS = "anonymous"
        SYSTEM = "system"

    #: The application has no right to change or delete a row; a trigger stops everybody else.
    append_only: ClassVar[bool] = True

    created_at = None  # type: ignore[assignment]
    #: None: the platform's chain. No constraint: the trail outlives the tenant.
    tenant = models.ForeignKey(  # type: ignore[assignment]
        "tenants.Tenant",
        null=True,
        db_constraint=False,
        on_delete=models.DO_NOTHING,
        related_name="+",
    )
    #: 1, 2, 3, … within the chain, without a gap.
    seq = models.PositiveBigIntegerField()
    occurred_at = models.DateTimeField()
    actor_type = models.CharField(max_length=16, choices=ActorType)
    #: A key's public id, a person's id, or the name of a task or command.
    actor_id = models.CharField(max_length=200)
    #: The actor's name at that time: the key's name or the person's address.
    actor_name = models.CharField(max_length=320, blank=True)
    #: "<resource type>.<past participle>", as in "api_key.revoked".
    action = models.CharField(max_length=64)
    resource_type = models.CharField(max_length=64)
    resource_id = models.CharField(max_length=64)
    #: The fields that changed; never a secret.
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    ip = models.GenericIPAddressField(null=True)
    request_id = models.CharField(max_length=64, blank=True)
    #: `hash` of the previous event; "" for the first.
    prev_hash = models.CharField(max_length=64, blank=True)
    #: `digest()` of this event.
    hash = models.CharField(max_length=64)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "seq"], name="audit_seq_once", nulls_distinct=False
            ),
        ]
        indexes = [models.Index(fields=["tenant", "action"])]

    def __str__(self) -> str:
        return f"{self.seq} {self.action}"

    def digest(self) -> str:
        """Return the SHA-256, in hex, of this row's content and of the previous hash."""
        content = [
            str(self.id),
            str(self.tenant_id) if self.tenant_id else None,
            self.seq,
            self.occurred_at.astimezone(dt.UTC).isoformat(),
            self.actor_type,
            self.actor_id,
            self.actor_name,
            self.action,
            self.resource_type,
            self.resource_id,
            self.before,
            self.after,
            self.ip,
            self.request_id,
            self.prev_hash,
        ]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()
