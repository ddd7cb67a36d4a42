"""Suites with their cases, runs of them with a result for each case, and the gate's decisions."""

from __future__ import annotations

from django.db import models

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.tenancy.scoping import TenantModel
from controlplane.tenants.models import User, slug_validator


class Judge(TenantModel):
    """A model behind any OpenAI-compatible endpoint that gives marks to answers."""

    name = models.CharField(max_length=63, validators=[slug_validator])
    #: The address up to `/v1`; `/chat/completions` is added.
    url = models.CharField(max_length=500)
    model = models.CharField(max_length=200)
    #: The API key, encrypted: see `evaluations.judge`.
    sealed = models.BinaryField(default=b"")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="judge_name_once")]

    def __str__(self) -> str:
        return self.name


class Suite(TenantModel):
    """A named list of cases. It grows by versions; a version never changes."""

    name = models.CharField(max_length=63, validators=[slug_validator])
    description = models.CharField(max_length=500, blank=True)
    #: The number of the newest version; a number is never used twice.
    last_number = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="suite_name_once")]

    def __str__(self) -> str:
        return self.name


class SuiteVersion(TenantModel):
    suite = models.ForeignKey(Suite, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    num_cases = models.PositiveIntegerField()
    num_bytes = models.PositiveIntegerField()
    #: The source of its cases: {"kind": "api" | "dataset" | "requests", …}.
    origin = models.JSONField(default=dict)
    #: True if its cases have words of requests: reading them, and the answers, needs
    #: `requests:content`.
    has_requests = models.BooleanField(default=False, db_default=False)
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["suite", "number"], name="suite_version_once")
        ]

    def __str__(self) -> str:
        return f"{self.suite.name}@{self.number}"


class Case(TenantModel):
    """One prompt, the answer that is expected, and how answers are checked."""

    suite_version = models.ForeignKey(SuiteVersion, on_delete=models.CASCADE, related_name="cases")
    position = models.PositiveIntegerField()
    #: The part of the suite that it belongs to; "": none.
    slice = models.CharField(max_length=63, blank=True)
    messages = models.JSONField()
    expected = models.TextField(blank=True)
    #: See `evaluations.checks`.
    checks = models.JSONField(default=list)
    #: `leakage.prompt_digest` of its messages.
    prompt_sha256 = models.CharField(max_length=64)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["suite_version", "position"], name="case_once")
        ]

    def __str__(self) -> str:
        return f"{self.suite_version_id}#{self.position}"


class Evaluation(TenantModel):
    """A run of a suite's version on a model.

    queued -> running -> judging -> succeeded | failed | cancelled. Its process holds a lease, under
    the number of its attempt. `judging` follows only if cases have a judge: it is another process's
    work, which has the keys of judges.
    """

    MODEL_FIELD = "model"

    class Status(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        JUDGING = "judging"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"

    ACTIVE = (Status.QUEUED, Status.RUNNING, Status.JUDGING)

    suite_version = models.ForeignKey(
        SuiteVersion, on_delete=models.CASCADE, related_name="evaluations"
    )
    #: The model as requests name it.
    model = models.CharField(max_length=200)
    #: The exact model at the time of creation; if the name means another one, the run fails.
    served = models.CharField(max_length=1000)
    adapter = models.ForeignKey(
        Adapter, null=True, on_delete=models.CASCADE, related_name="evaluations"
    )
    status = models.CharField(max_length=16, choices=Status, default=Status.QUEUED)
    max_tokens = models.PositiveIntegerField(default=256)
    seed = models.PositiveIntegerField(default=0)
    #: The `BatchScores` with the log-probabilities, even if deleted since; null: serving workers
    #: are asked. Two evaluations are compared only if this is equal.
    scored_in = models.UUIDField(null=True)
    error = models.CharField(max_length=1000, blank=True)
    num_done = models.PositiveIntegerField(default=0)
    #: Means over the cases, by metric: see `evaluations.execution.summary_of`.
    summary = models.JSONField(default=dict)
    attempts = models.PositiveIntegerField(default=0)
    #: Number of consecutive turns in which no case could be asked.
    failures = models.PositiveSmallIntegerField(default=0)
    lease_until = models.DateTimeField(null=True)
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "created_at"], name="evaluations_by_age"),
            models.Index(
                fields=["lease_until"],
                condition=models.Q(status__in=("queued", "running", "judging")),
                name="evaluations_active",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.status}"


class Result(TenantModel):
    """A model's answer to one case."""

    MODEL_FIELD = "evaluation__model"

    evaluation = models.ForeignKey(Evaluation, on_delete=models.CASCADE, related_name="results")
    case = models.ForeignKey(Case, on_delete=models.CASCADE, related_name="+")
    output = models.TextField(blank=True)
    finish_reason = models.CharField(max_length=16, blank=True)
    #: The reason for a missing answer; "": there is one.
    error = models.CharField(max_length=500, blank=True)
    #: Score of each check, from 0 to 1; null: a judge has not given it yet.
    scores = models.JSONField(default=list)
    #: Their mean; null: not known yet, or the case has no checks.
    score = models.FloatField(null=True)
    #: Log-probability of the expected answer, and its tokens; 0: not scored.
    logprob = models.FloatField(null=True)
    num_tokens = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["evaluation", "case"], name="result_once"),
        ]

    def __str__(self) -> str:
        return f"{self.evaluation_id} {self.case_id}"


class BatchScores(TenantModel):
    """Scores of the expected answers of a gate's suite, under a trained version and the live one.

    The batch that trained the version computed them: see `evaluations.batch_scores`.

    It is deleted with the version or the suite; an adapter has a few.
    """

    MODEL_FIELD = "version__adapter__name"

    version = models.OneToOneField(
        AdapterVersion, on_delete=models.CASCADE, related_name="batch_scores"
    )
    suite_version = models.ForeignKey(SuiteVersion, on_delete=models.CASCADE, related_name="+")
    #: Digests of the scored adapter and of the live one, and the base's revision.
    digest = models.CharField(max_length=64)
    live_digest = models.CharField(max_length=64)
    base_revision = models.CharField(max_length=64)
    #: `contract.training.judging.cases_sha256` of the cases that were scored.
    cases_sha256 = models.CharField(max_length=64)
    #: [log-probability or null, tokens] of each case with an expected answer, in their order.
    candidate = models.JSONField()
    live = models.JSONField()

    def __str__(self) -> str:
        return f"scores of {self.version_id}"


class GateDecision(TenantModel):
    """The gate of one version: its two evaluations, and what followed from them."""

    MODEL_FIELD = "version__adapter__name"

    class Status(models.TextChoices):
        WAITING = "waiting", "its evaluations run"
        PROMOTE = "promote", "it passed"
        HOLD = "hold", "it could not be shown that it is as good"
        REJECT = "reject", "it is worse"

    version = models.OneToOneField(AdapterVersion, on_delete=models.CASCADE, related_name="gate")
    #: The number of the live version at its beginning.
    live_number = models.PositiveIntegerField(null=True)
    suite_version = models.ForeignKey(
        SuiteVersion, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    candidate = models.ForeignKey(
        Evaluation, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    live = models.ForeignKey(Evaluation, null=True, on_delete=models.SET_NULL, related_name="+")
    status = models.CharField(max_length=16, choices=Status, default=Status.WAITING)
    #: `gate_policy.GatePolicy` as it was at the start.
    policy = models.JSONField(default=dict)
    #: Sentences, for people.
    reasons = models.JSONField(default=list)
    #: `decision.Decision`'s findings, with intervals.
    findings = models.JSONField(default=list)
    #: {"num", "before", "after"}: `habits.Habits` of the live version's answers and the new one's;
    #: {}: no answers were compared.
    habits = models.JSONField(default=dict)
    num_leaked = models.PositiveIntegerField(default=0)
    #: The consequence: "promoted", "canary", "held"; "" while it waits.
    outcome = models.CharField(max_length=16, blank=True)
    decided_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["created_at"],
                condition=models.Q(status="waiting"),
                name="gates_waiting",
            )
        ]

    def __str__(self) -> str:
        return f"gate of {self.version_id}"
