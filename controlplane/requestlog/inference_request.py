"""The request log: one row per accepted request; the accountant writes it when the request ends."""

from __future__ import annotations

from django.db import models

from controlplane.tenancy.scoping import TenantModel


class InferenceRequest(TenantModel):
    """One request's parameters and result, without its prompt and its answer."""

    MODEL_FIELD = "model"

    request_id = models.CharField(max_length=64, unique=True)
    api_key_id = models.UUIDField(null=True)
    model = models.CharField(max_length=200)
    base_model = models.CharField(max_length=63)
    adapter_version_id = models.UUIDField(null=True)
    #: The revision of the alias in `model`, and its target that answered.
    alias_revision_id = models.UUIDField(null=True)
    alias_target = models.CharField(max_length=16, blank=True, default="", db_default="")
    worker_id = models.CharField(max_length=100)
    stream = models.BooleanField(default=False)
    finish_reason = models.CharField(max_length=32)
    error_code = models.CharField(max_length=64, blank=True)
    #: The address to which it was sent.
    endpoint = models.CharField(max_length=64, blank=True, default="")
    is_batch = models.BooleanField(default=False)
    #: Digests of the adapters that answered.
    digests = models.JSONField(default=list, blank=True)
    #: The weights of a blend's digests. Old rows have null here and in the next two fields.
    weights = models.JSONField(null=True)
    #: Its sampling parameters, without stop strings and biases, which are content.
    sampling = models.JSONField(null=True)
    #: Number of times that workers started it.
    attempts = models.PositiveIntegerField(null=True)
    prompt_tokens = models.PositiveIntegerField(default=0)
    cached_tokens = models.PositiveIntegerField(default=0)
    completion_tokens = models.PositiveIntegerField(default=0)
    accepted_at = models.DateTimeField()
    queue_ms = models.FloatField(default=0)
    load_ms = models.FloatField(default=0)
    first_token_ms = models.FloatField(null=True)
    total_ms = models.FloatField(default=0)
    #: The place of its slowest adapter: gpu, host, disk or store; "": it had none.
    tier = models.CharField(max_length=8, blank=True, default="", db_default="")

    #: Drafted tokens: accepted ones by source, and "rejected"; null: there were none.
    drafts = models.JSONField(null=True)

    class Meta:
        app_label = "inference"  # kept for its table and migrations
        indexes = [models.Index(fields=["tenant", "accepted_at"])]

    def __str__(self) -> str:
        return self.request_id
