"""Base models, and each tenant's adapters with their versions."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

from controlplane.tenancy.scoping import TenantModel, new_id
from controlplane.tenants.models import User, slug_validator


def today() -> dt.date:
    """Return the date in UTC, with which shutdown dates are compared."""
    return timezone.now().astimezone(dt.UTC).date()


def is_serving(prefix: str = "") -> Q:
    """Return the condition for base models that requests may use today.

    prefix  the path to the base model from other rows, such as "base_model__"
    """
    return Q(**{f"{prefix}is_active": True}) & is_not_over(prefix)


def is_not_over(prefix: str = "") -> Q:
    """Return the condition for rows whose shutdown date has not come."""
    is_to_come = Q(**{f"{prefix}shutdown_date__gt": today()})
    return Q(**{f"{prefix}shutdown_date": None}) | is_to_come


class BaseModel(models.Model):
    """A model that adapters are made for. Global: the operator manages it, all tenants use it."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    name = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    #: sha256 of the weights' source; part of every adapter's digest.
    revision = models.CharField(max_length=64)
    #: The Hugging Face config.json, with the shapes that adapters must fit.
    config = models.JSONField()
    context_length = models.PositiveIntegerField()
    max_rank = models.PositiveIntegerField(default=256)
    #: Other names by which adapters may call it, such as its Hub repository: see `base_claim`.
    known_names = models.JSONField(
        default=list, blank=True, db_default=models.Value([], models.JSONField())
    )
    is_active = models.BooleanField(default=True)
    shutdown_date = models.DateField(
        null=True,
        blank=True,
        help_text="From the beginning of this day (UTC) requests for it, and for every adapter of "
        "it, are refused, and no training begins. Clients see it in their list of models.",
    )
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name

    @property
    def is_shut_down(self) -> bool:
        """Return whether its shutdown date has come."""
        return self.shutdown_date is not None and self.shutdown_date <= today()


class Adapter(TenantModel):
    """A named LoRA adapter; its name is what requests put in `model`."""

    MODEL_FIELD = "name"

    class PromotionPolicy(models.TextChoices):
        """The rule for a version that becomes ready while another one is live."""

        HOLD = "hold", "wait until somebody makes it live"
        IMMEDIATE = "immediate", "make it live at once"
        GATE = "gate", "compare it with the live one on a suite, and decide by that"

    name = models.CharField(max_length=63, validators=[slug_validator])
    base_model = models.ForeignKey(BaseModel, on_delete=models.PROTECT, related_name="+")
    description = models.CharField(max_length=500, blank=True)
    promotion_policy = models.CharField(
        max_length=16,
        choices=PromotionPolicy,
        default=PromotionPolicy.HOLD,
        db_default=PromotionPolicy.HOLD,  # for processes that do not know the column yet
    )
    #: Settings of the policy `gate`: see `evaluations.gate_policy`.
    gate = models.JSONField(
        default=dict, blank=True, db_default=models.Value({}, models.JSONField())
    )
    #: The version that the name without a number means; None until one is ready.
    live_version = models.ForeignKey(
        "AdapterVersion", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    #: The highest number of a version that was deleted: no later version gets it.
    last_deleted = models.PositiveIntegerField(default=0, db_default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], name="adapter_name_once"),
        ]

    def __str__(self) -> str:
        return self.name


class Promotion(TenantModel):
    """One change of an adapter's live version: what, who, when and why. Never changed."""

    MODEL_FIELD = "adapter__name"

    class Cause(models.TextChoices):
        FIRST = "first", "nothing was live when it became ready"
        POLICY = "policy", "the adapter's policy is immediate"
        GATE = "gate", "it passed the gate"
        PROMOTED = "promoted", "somebody made it live"
        ROLLED_BACK = "rolled_back", "somebody went back to it"
        RETIRED = "retired", "the live version was retired"
        DELETED = "deleted", "the live version was deleted"

    adapter = models.ForeignKey(Adapter, on_delete=models.CASCADE, related_name="promotions")
    #: The version that is live from then on; None: none is.
    version = models.ForeignKey(
        "AdapterVersion", null=True, on_delete=models.SET_NULL, related_name="+"
    )
    #: Its number, which stays when the version is deleted.
    number = models.PositiveIntegerField(null=True)
    #: The number of the version that was live before; None: none was.
    previous_number = models.PositiveIntegerField(null=True)
    cause = models.CharField(max_length=16, choices=Cause)
    reason = models.CharField(max_length=500, blank=True)
    #: The actor as in the audit trail.
    actor_type = models.CharField(max_length=16)
    actor_name = models.CharField(max_length=320, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "adapter", "-created_at"], name="promotions_of_adapter")
        ]


class AdapterVersion(TenantModel):
    """One immutable set of weights of an adapter.

    uploading -> uploaded -> validating -> ready | rejected, and ready -> retired. Every move is a
    compare-and-set.
    """

    MODEL_FIELD = "adapter__name"

    class Status(models.TextChoices):
        UPLOADING = "uploading"
        UPLOADED = "uploaded"
        VALIDATING = "validating"
        READY = "ready"
        REJECTED = "rejected"
        RETIRED = "retired"

    class Source(models.TextChoices):
        UPLOAD = "upload"
        TRAINING = "training"
        IMPORT = "import"
        #: A training's checkpoint: it never becomes live by itself.
        CHECKPOINT = "checkpoint"

    adapter = models.ForeignKey(Adapter, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    status = models.CharField(max_length=16, choices=Status, default=Status.UPLOADING)
    source = models.CharField(max_length=16, choices=Source, default=Source.UPLOAD)
    #: `contract.messages.protocol.adapter_digest`; set when ready.
    digest = models.CharField(max_length=64, blank=True)
    #: An import's host; from the Hub also repository, revision and the commit, when known.
    origin = models.JSONField(
        default=dict, blank=True, db_default=models.Value({}, models.JSONField())
    )
    #: The digest of checked bytes in the store, until it is certain that they are needed.
    kept_digest = models.CharField(max_length=64, blank=True, default="", db_default="")
    #: True when its orphaned objects are removed: see `adapters.orphaned_objects`.
    is_cleared = models.BooleanField(default=False, db_default=False)
    #: When the files of a retired version were removed.
    removed_at = models.DateTimeField(null=True, blank=True)
    #: Lengths of adapter_model.safetensors and adapter_config.json, as stated before the upload.
    num_bytes = models.BigIntegerField(default=0)
    config_num_bytes = models.PositiveIntegerField(default=0)
    #: True if its config may claim another base model than the adapter's.
    accepts_base_mismatch = models.BooleanField(default=False, db_default=False)
    #: True if workers that keep adapters in FP8 keep this one as it is stored, whatever was found.
    keeps_original = models.BooleanField(default=False, db_default=False)
    #: By how many nats a token's log-probability is further from PEFT's, on average, with its copy
    #: in FP8 than with its original; None: no probe has compared the two.
    copy_nats = models.FloatField(null=True, blank=True)
    #: When it was deprecated; it still answers.
    deprecated_at = models.DateTimeField(null=True, blank=True)
    #: From the beginning of this day (UTC) requests for it are refused; then it is retired.
    shutdown_date = models.DateField(null=True, blank=True)
    max_rank = models.PositiveIntegerField(default=0)
    #: [{"field", "message"}]: the reasons of its rejection, for its owner.
    reasons = models.JSONField(default=list)
    #: Facts from the check: ranks, target modules, dtype, number of tensors.
    report = models.JSONField(default=dict)
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    ready_at = models.DateTimeField(null=True, blank=True)
    status_changed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["adapter", "number"], name="version_number_once"),
        ]
        indexes = [
            models.Index(fields=["tenant", "adapter", "number"]),
            # For operators, who know a digest or how it begins, and no tenant.
            models.Index(
                fields=["digest"], opclasses=["varchar_pattern_ops"], name="versions_by_digest"
            ),
            models.Index(
                fields=["status_changed_at"],
                condition=models.Q(is_cleared=False),
                name="versions_uncleared",
            ),
            models.Index(
                fields=["tenant", "created_at"],
                condition=models.Q(status__in=("uploaded", "validating")),
                name="versions_checking",
            ),
            models.Index(
                fields=["status_changed_at"],
                condition=models.Q(status="retired", removed_at=None),
                name="versions_to_remove",
            ),
            models.Index(
                fields=["tenant", "kept_digest"],
                condition=~models.Q(kept_digest=""),
                name="versions_kept",
            ),
            models.Index(
                fields=["shutdown_date"],
                condition=models.Q(status="ready", shutdown_date__isnull=False),
                name="versions_to_retire",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.adapter.name}@{self.number}"

    def move(self, before: Status, after: Status, **fields: Any) -> bool:
        """Change the status and `fields` by compare-and-set. -> whether this call did it."""
        fields |= {"status": after, "status_changed_at": timezone.now()}
        rows = AdapterVersion.objects.filter(pk=self.pk, status=before)
        return rows.update(**fields) == 1

    @property
    def is_shut_down(self) -> bool:
        """Return whether its shutdown date has come."""
        return self.shutdown_date is not None and self.shutdown_date <= today()

    @property
    def is_in_fp8(self) -> bool:
        """Return whether workers that keep adapters in FP8 answer with its copy."""
        nats = self.copy_nats
        return not self.keeps_original and nats is not None and nats <= settings.COPY_MAX_NATS

    @property
    def config_key(self) -> str:
        """Return the S3 key of the accepted adapter_config.json."""
        return f"t/{self.tenant_id}/adapters/{self.digest}/adapter_config.json"

    @property
    def tensors_key(self) -> str:
        """Return the S3 key of the accepted adapter_model.safetensors."""
        return f"t/{self.tenant_id}/adapters/{self.digest}/adapter_model.safetensors"

    @property
    def staging_prefix(self) -> str:
        """Return the beginning of the S3 keys of its staging area."""
        return f"t/{self.tenant_id}/u/{self.id}/"

    @property
    def staged_config_key(self) -> str:
        """Return the S3 key that the client's presigned URL writes adapter_config.json to."""
        return f"t/{self.tenant_id}/u/{self.id}/adapter_config.json"

    @property
    def staged_tensors_key(self) -> str:
        """Return the S3 key that the client's presigned URL writes adapter_model.safetensors to."""
        return f"t/{self.tenant_id}/u/{self.id}/adapter_model.safetensors"


class VersionUpload(TenantModel):
    """The multipart upload of one file of a version; it ends with the version's staging area."""

    MODEL_FIELD = "version__adapter__name"

    version = models.ForeignKey(AdapterVersion, on_delete=models.CASCADE, related_name="uploads")
    #: adapter_config.json or adapter_model.safetensors.
    file = models.CharField(max_length=32)
    num_bytes = models.BigIntegerField()
    #: The length of each part but the last.
    part_bytes = models.PositiveIntegerField()
    #: The store's name of the upload; "" until it is begun there.
    upload_id = models.TextField(blank=True, default="")
    #: The SHA-256 in hex that the client stated of each part, by number as text; never changed.
    digests = models.JSONField(default=dict)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["version", "file"], name="version_upload_once"),
        ]

    def __str__(self) -> str:
        return f"{self.version_id} {self.file}"

    @property
    def num_parts(self) -> int:
        return -(-self.num_bytes // self.part_bytes)

    def length_of(self, number: int) -> int:
        """Return the length of a part; parts are counted from 1."""
        return min(self.part_bytes, self.num_bytes - (number - 1) * self.part_bytes)

    @property
    def key(self) -> str:
        """Return the S3 key of the file in the staging area."""
        return f"t/{self.tenant_id}/u/{self.version_id}/{self.file}"


class AdapterInspection(TenantModel):
    """The probe and the doctor's report of one version: see `controlplane.evaluations.inspections`.

    While `is_held`, its version stays `validating` until the probe agrees or rejects it.
    """

    MODEL_FIELD = "version__adapter__name"

    class Status(models.TextChoices):
        WAITING = "waiting", "its turn has not come yet"
        AGREED = "agreed", "a worker computes what PEFT computes"
        MISMATCH = "mismatch", "a worker computes something else"
        NOT_RUN = "not_run", "no worker was asked"

    #: It is inspected again in these.
    OPEN = (Status.WAITING, Status.NOT_RUN)

    version = models.OneToOneField(
        AdapterVersion, on_delete=models.CASCADE, related_name="inspection"
    )
    status = models.CharField(max_length=16, choices=Status, default=Status.WAITING)
    #: Why the probe was not run, or what it found.
    why = models.CharField(max_length=500, blank=True)
    is_held = models.BooleanField(default=False)
    #: When the version continues without the probe; None: never.
    held_until = models.DateTimeField(null=True)
    #: `ingest.Facts` of a version that is held.
    facts = models.JSONField(default=dict)
    #: The worker that agreed, and how exactly: a short text, shown with the version.
    probe = models.JSONField(default=dict)
    #: Prompts, and each log-probability by PEFT and by the worker.
    compared = models.JSONField(default=list)
    doctor = models.JSONField(default=dict)
    #: Number of times an inspector took it up: the fencing token of its lease.
    attempts = models.PositiveIntegerField(default=0)
    #: Until then an inspector holds it, or it is too early to try again.
    lease_until = models.DateTimeField(null=True)
    inspected_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["lease_until"],
                condition=models.Q(status__in=("waiting", "not_run")),
                name="inspections_open",
            ),
        ]


class VersionImport(TenantModel):
    """The work of fetching an import's files; the row goes with its secrets when that has ended."""

    MODEL_FIELD = "version__adapter__name"

    version = models.OneToOneField(AdapterVersion, on_delete=models.CASCADE, related_name="+")
    #: Secrets of the source, encrypted: see `adapters.import_sources`.
    sealed = models.BinaryField()
    attempts = models.PositiveSmallIntegerField(default=0)
    next_attempt_at = models.DateTimeField(default=timezone.now)
    #: See `tenancy.row_lease`.
    fence = models.PositiveIntegerField(default=0)
    lease_until = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return str(self.version_id)


class DeletedVersion(TenantModel):
    """The objects that a deleted version left in the store: see `deletion`."""

    #: The id of the version, whose row is gone; its staging area has this name.
    version_id = models.UUIDField()
    digest = models.CharField(max_length=64, blank=True)
    #: They count in the tenant's storage until they are removed.
    num_bytes = models.BigIntegerField(default=0)
    #: When its bytes were removed. The row stays until no upload to its URLs can arrive.
    removed_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "version_id"]),
            models.Index(fields=["created_at"], name="deleted_versions"),
        ]

    def __str__(self) -> str:
        return str(self.version_id)
