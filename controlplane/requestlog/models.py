"""Stored content, refusals, the log policy, captured requests and feedback.

`inference_request` has the log lines.
"""

from __future__ import annotations

from django.db import models

from controlplane.tenancy.scoping import TenantModel


class LogPolicy(TenantModel):
    """A tenant's policy for the log, with time limits; without one no content is stored."""

    class Content(models.TextChoices):
        """The stored prompts and answers: none, those of requests with `store`, or all."""

        OFF = "off"
        ON_REQUEST = "on_request"
        ALL = "all"

    content = models.CharField(max_length=16, choices=Content, default=Content.OFF)
    content_days = models.PositiveSmallIntegerField(default=30)
    metadata_days = models.PositiveSmallIntegerField(default=90)
    #: The key that encrypts the content, itself encrypted. Without it nobody can read the content.
    wrapped_key = models.BinaryField(default=bytes, max_length=200)
    key_made_at = models.DateTimeField(null=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant"], name="log_policy_once")]

    def __str__(self) -> str:
        return self.content


class RequestContent(TenantModel):
    """Prompt and answers of one request, encrypted with the tenant's key."""

    request_id = models.CharField(max_length=64, unique=True)
    sealed = models.BinaryField()
    num_bytes = models.PositiveIntegerField()

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"])]

    def __str__(self) -> str:
        return self.request_id


class RefusalHour(TenantModel):
    """Numbers of requests refused at admission in one hour (UTC), by reason."""

    starts_at = models.DateTimeField()
    endpoint = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField()
    code = models.CharField(max_length=64)
    requests = models.PositiveBigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "starts_at", "endpoint", "status", "code"],
                name="refusal_hour_once",
            )
        ]

    def __str__(self) -> str:
        return f"{self.starts_at:%Y-%m-%d %H:%M} {self.status} {self.code}"


class CapturePolicy(TenantModel):
    """A tenant's policy for capture, see `requestlog.capture`; without one nothing is captured."""

    #: Share of all requests: 0 to 1.
    share = models.FloatField(default=0)
    #: Shares by the model's name, in place of `share`.
    shares = models.JSONField(default=dict)
    days = models.PositiveSmallIntegerField(default=30)
    max_rows = models.PositiveIntegerField(default=10_000)
    max_bytes = models.PositiveBigIntegerField(default=64 * 1024**2)
    #: The key that encrypts the rows, itself encrypted.
    wrapped_key = models.BinaryField(default=bytes, max_length=200)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant"], name="capture_policy_once")]

    def __str__(self) -> str:
        return f"{self.share} {self.shares}"


class Rating(models.TextChoices):
    GOOD = "good"
    BAD = "bad"


class CapturedRequest(TenantModel):
    """A chat's prompt, tools and answer, encrypted with the tenant's key, to train on."""

    MODEL_FIELD = "model"

    request_id = models.CharField(max_length=64, unique=True)
    #: The model as the request named it.
    model = models.CharField(max_length=200)
    sealed = models.BinaryField()
    #: The corrected answer, encrypted; empty: there is none.
    sealed_answer = models.BinaryField(default=bytes)
    #: Length of both.
    num_bytes = models.PositiveIntegerField()
    rating = models.CharField(max_length=8, choices=Rating, blank=True, default="")
    #: The ids of the datasets that were made of it or have its row behind theirs.
    datasets = models.JSONField(
        default=list, blank=True, db_default=models.Value([], models.JSONField())
    )
    #: True if there is feedback: such rows are deleted last.
    is_rated = models.BooleanField(default=False)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "is_rated", "created_at"], name="captured_make_room"),
            models.Index(fields=["tenant", "created_at"], name="captured_by_age"),
        ]

    def __str__(self) -> str:
        return self.request_id


class Feedback(TenantModel):
    """A rating or correction of a request's answer; a later one replaces it."""

    MODEL_FIELD = "model"

    request_id = models.CharField(max_length=64)
    model = models.CharField(max_length=200)
    rating = models.CharField(max_length=8, choices=Rating, blank=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "request_id"], name="feedback_once")
        ]
        indexes = [models.Index(fields=["tenant", "created_at"], name="feedback_by_age")]

    def __str__(self) -> str:
        return f"{self.request_id} {self.rating}"
