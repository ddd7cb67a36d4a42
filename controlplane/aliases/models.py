"""Aliases and their revisions.

An alias's rows: `Alias` has the number of the revision that holds now, `AliasRevision` what was
published, `AliasPart` the versions that it names. Revisions and parts never change; only deletions
of adapters and versions, which current revisions do not name, empty the references of old ones.
"""

from __future__ import annotations

import dataclasses

from django.db import models
from django.db.models import F, Q, Value

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.aliases.verdict import Counts
from controlplane.tenancy.scoping import TenantModel
from controlplane.tenants.models import slug_validator


class Alias(TenantModel):
    """A name that requests put in `model`; it hides an adapter of the same name."""

    MODEL_FIELD = "name"

    name = models.CharField(max_length=63, validators=[slug_validator])
    #: The number of the current revision; changed by compare-and-set only.
    revision_number = models.PositiveIntegerField(default=1)
    updated_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="alias_name_once")]

    def __str__(self) -> str:
        return self.name


class AliasRevision(TenantModel):
    """The targets of an alias, and the defaults of its requests. Never changed."""

    MODEL_FIELD = "alias__name"

    class Cause(models.TextChoices):
        CREATED = "created", "the alias was made"
        CHANGED = "changed", "somebody changed it"
        RAMPED = "ramped", "the canary got another share"
        CANARY_PROMOTED = "canary_promoted", "the canary became the primary"
        CANARY_REMOVED = "canary_removed", "the canary was taken away"
        CANARY_FAILED = "canary_failed", "the canary was worse than the primary"
        ROLLED_BACK = "rolled_back", "somebody went back to an earlier revision"

    class Warmth(models.TextChoices):
        """The place where workers keep its adapters while nobody asks for them."""

        PINNED = "pinned", "stays on the GPUs"
        WARM = "warm", "stays in the memory of the hosts"
        COLD = "cold", "is loaded when it is asked for"

    alias = models.ForeignKey(Alias, on_delete=models.CASCADE, related_name="revisions")
    number = models.PositiveIntegerField()
    cause = models.CharField(max_length=32, choices=Cause)
    reason = models.CharField(max_length=500, blank=True)
    #: The actor as in the audit trail.
    actor_type = models.CharField(max_length=16)
    actor_name = models.CharField(max_length=320, blank=True)
    #: The base model of all its targets.
    base_model = models.ForeignKey(BaseModel, on_delete=models.PROTECT, related_name="+")
    #: Percent of the callers whom the canary answers; 0 without one.
    canary_percent = models.PositiveSmallIntegerField(default=0)
    #: The schema as text, because jsonb does not keep the order of properties; "": none.
    json_schema = models.TextField(blank=True, default="")
    system_prompt = models.TextField(blank=True, default="")
    sampling = models.JSONField(default=dict, blank=True)
    warmth = models.CharField(max_length=16, choices=Warmth, default=Warmth.COLD)
    #: Fields of `verdict.Guard` that differ from the default.
    guard = models.JSONField(default=dict, blank=True, db_default=Value({}, models.JSONField()))
    #: The revision that a rollback copied.
    copied_from = models.PositiveIntegerField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["alias", "number"], name="alias_revision_once"),
            models.CheckConstraint(
                condition=Q(canary_percent__gte=0, canary_percent__lte=100),
                name="alias_percent_in_range",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.alias_id}#{self.number}"


class AliasPart(TenantModel):
    """One adapter of a target: a target with several is their weighted sum."""

    MODEL_FIELD = "revision__alias__name"

    class Target(models.TextChoices):
        PRIMARY = "primary"
        CANARY = "canary"

    revision = models.ForeignKey(AliasRevision, on_delete=models.CASCADE, related_name="parts")
    target = models.CharField(max_length=16, choices=Target)
    #: The part's place in its target.
    position = models.PositiveSmallIntegerField(default=0)
    #: None when it was deleted; the name stays.
    adapter = models.ForeignKey(Adapter, null=True, on_delete=models.SET_NULL, related_name="+")
    adapter_name = models.CharField(max_length=63)
    #: None: whichever version is live (without a number), or it was deleted (with one).
    version = models.ForeignKey(
        AdapterVersion, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    number = models.PositiveIntegerField(null=True)
    weight = models.FloatField(default=1.0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["revision", "target", "position"], name="alias_part_once"
            )
        ]

    def __str__(self) -> str:
        at = "" if self.number is None else f"@{self.number}"
        return f"{self.adapter_name}{at}"


class TargetCount(TenantModel):
    """Counts of the answers of one target, beside a canary; see `aliases.verdict`.

    Written in the transaction that settles the requests, so each counts once.
    """

    MODEL_FIELD = "revision__alias__name"

    revision = models.ForeignKey(AliasRevision, on_delete=models.CASCADE, related_name="counts")
    target = models.CharField(max_length=16, choices=AliasPart.Target)
    requests = models.PositiveBigIntegerField(default=0)
    errors = models.PositiveBigIntegerField(default=0)
    checked = models.PositiveBigIntegerField(default=0)
    broken = models.PositiveBigIntegerField(default=0)
    truncated = models.PositiveBigIntegerField(default=0)
    #: Histograms: bucket -> requests.
    first_token = models.JSONField(default=dict)
    token = models.JSONField(default=dict)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["revision", "target"], name="target_count_once")
        ]

    def __str__(self) -> str:
        return f"{self.revision_id} {self.target}"

    @property
    def counts(self) -> Counts:
        return Counts.from_dict({name: getattr(self, name) for name in _COUNTED})

    def put(self, counts: Counts) -> None:
        """Set what was counted; `save` it afterwards."""
        for name, value in counts.to_dict().items():
            setattr(self, name, value)


_COUNTED = [field.name for field in dataclasses.fields(Counts)]


class Ramp(TenantModel):
    """A plan by which an alias's canary gets more and more requests; an alias has one at most."""

    MODEL_FIELD = "alias__name"

    class State(models.TextChoices):
        RUNNING = "running", "runs"
        PAUSED = "paused", "is paused"
        DONE = "done", "is done"
        STOPPED = "stopped", "was stopped"

    class AtEnd(models.TextChoices):
        PROMOTE = "promote", "the canary becomes the primary"
        STAY = "stay", "the canary stays at its last share"

    ACTIVE = (State.RUNNING.value, State.PAUSED.value)

    alias = models.OneToOneField(Alias, on_delete=models.CASCADE, related_name="ramp")
    #: [{"percent", "minutes", "min_requests"}]: what must have passed before the next step.
    steps = models.JSONField()
    at_end = models.CharField(max_length=16, choices=AtEnd, default=AtEnd.PROMOTE)
    state = models.CharField(max_length=16, choices=State, default=State.RUNNING)
    #: The number of the step that holds, from 0.
    step = models.PositiveSmallIntegerField(default=0)
    #: The number of the revision that its last step made: after any other change it stops.
    revision_number = models.PositiveIntegerField()
    #: When the step's minutes are over.
    due_at = models.DateTimeField()
    #: The reason why it stopped.
    reason = models.CharField(max_length=500, blank=True, default="")
    #: The actor who began it, as in the audit trail.
    actor_type = models.CharField(max_length=16)
    actor_name = models.CharField(max_length=320, blank=True)
    #: Time of its last change, or of the last look that found nothing to do.
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["due_at"],
                condition=models.Q(state="running"),
                name="ramps_running",
            )
        ]

    def __str__(self) -> str:
        return f"{self.alias_id} {self.state} {self.step + 1}/{len(self.steps)}"

    @property
    def is_active(self) -> bool:
        return self.state in Ramp.ACTIVE


def is_current(prefix: str = "") -> Q:
    """Return the condition for current revisions.

    prefix  the path to the revision from other rows, such as "revision__"
    """
    return Q(**{f"{prefix}number": F(f"{prefix}alias__revision_number")})
