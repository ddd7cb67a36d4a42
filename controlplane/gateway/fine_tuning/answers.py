"""Jobs, their events and checkpoints, as OpenAI writes them."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from contract.training.job import Hyperparameters, defaults_of
from controlplane.files.models import File
from controlplane.gateway.fine_tuning.checkpoints import Checkpoint
from controlplane.gateway.rest.fields import Constant, DescribedField, PublicId, UnixTime
from controlplane.tenancy.public_ids import public_id
from controlplane.training.models import TrainingEvent, TrainingRun
from controlplane.training.runs import picking

Status = TrainingRun.Status

#: A run that publishes is running to OpenAI's clients. Files are validated before a job is made, so
#: no job is ever in OpenAI's `validating_files`.
STATUSES = ("queued", "running", "paused", "succeeded", "failed", "cancelled")
#: The version's id behind it.
CHECKPOINT_PREFIX = "ftckpt-"
_DEFAULTS = Hyperparameters()
_OBJECT = {"type": "object", "additionalProperties": True}
#: Fields of the trainer's job -> fields of the client's request.
_PARAMS = {
    "dataset": "training_file",
    "validation_dataset": "validation_file",
    "base_model_dir": "model",
    "warm_start": "model",
    "hyperparameters.epochs": "hyperparameters.n_epochs",
    "hyperparameters.batch_size": "hyperparameters.batch_size",
    "hyperparameters.learning_rate": "hyperparameters.learning_rate_multiplier",
    "hyperparameters.beta": "method.dpo.hyperparameters.beta",
    "hyperparameters.grader": "method.reinforcement.grader",
}


def fine_tuned_model(run: TrainingRun) -> str | None:
    """Return the name of the model that the run made; None unless it has succeeded."""
    if run.status != Status.SUCCEEDED or run.version is None:
        return None
    return f"{run.adapter.name}@{run.version.number}"


def _file_id(pk: uuid.UUID | None) -> str | None:
    return None if pk is None else public_id(File.PREFIX, pk)


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 9)


def _method(run: TrainingRun) -> str:
    return str(run.hyperparameters.get("method", _DEFAULTS.method))


def _hyperparameters(run: TrainingRun) -> dict[str, Any]:
    given, defaults = run.hyperparameters, defaults_of(_method(run))
    rate = given.get("learning_rate", defaults.learning_rate) / defaults.learning_rate
    return {
        "n_epochs": _number(given.get("epochs", _DEFAULTS.epochs)),
        "batch_size": given.get("batch_size", _DEFAULTS.batch_size),
        "learning_rate_multiplier": _number(round(rate, 9)),
    }


class FineTuningErrorSerializer(serializers.Serializer[TrainingRun]):
    code = serializers.CharField()
    message = serializers.CharField()
    param = serializers.CharField(allow_null=True)


class FineTuningJobSerializer(serializers.Serializer[TrainingRun]):
    """A fine-tuning job, as OpenAI writes it; `lorikeet` is ours."""

    id = PublicId(TrainingRun.PREFIX)
    object = Constant("fine_tuning.job")
    model = serializers.SerializerMethodField(
        help_text="The base model, or the version that it begins from."
    )
    created_at = UnixTime()
    finished_at = UnixTime(allow_null=True)
    estimated_finish = serializers.SerializerMethodField()
    fine_tuned_model = serializers.SerializerMethodField(
        help_text="`adapter@version`, once it has succeeded."
    )
    organization_id = serializers.CharField(source="tenant.slug")
    status = serializers.SerializerMethodField()
    training_file = serializers.SerializerMethodField(help_text="null: the run is over a dataset.")
    validation_file = serializers.SerializerMethodField()
    result_files = serializers.SerializerMethodField()
    trained_tokens = serializers.SerializerMethodField()
    error = serializers.SerializerMethodField()
    hyperparameters = serializers.SerializerMethodField()
    method = serializers.SerializerMethodField()
    seed = serializers.SerializerMethodField()
    metadata = serializers.DictField(child=serializers.CharField(), allow_null=True)
    integrations = Constant(None)
    lorikeet = serializers.SerializerMethodField()

    def get_model(self, run: TrainingRun) -> str:
        return run.warm_start_name or run.adapter.base_model.name

    def get_estimated_finish(self, run: TrainingRun) -> int | None:
        eta_s = run.progress.get("eta_s")
        if run.status != Status.RUNNING or eta_s is None:
            return None
        return int((timezone.now() + dt.timedelta(seconds=eta_s)).timestamp())

    def get_fine_tuned_model(self, run: TrainingRun) -> str | None:
        return fine_tuned_model(run)

    @extend_schema_field({"type": "string", "enum": list(STATUSES)})
    def get_status(self, run: TrainingRun) -> str:
        return "running" if run.status == Status.PUBLISHING else str(run.status)

    def get_training_file(self, run: TrainingRun) -> str | None:
        return _file_id(run.training_file_id)

    def get_validation_file(self, run: TrainingRun) -> str | None:
        return _file_id(run.validation_file_id)

    def get_result_files(self, run: TrainingRun) -> list[str]:
        return [public_id(File.PREFIX, run.result_file_id)] if run.result_file_id else []

    def get_trained_tokens(self, run: TrainingRun) -> int | None:
        return None if run.status in TrainingRun.ACTIVE else run.trained_tokens

    @extend_schema_field(FineTuningErrorSerializer(allow_null=True))
    def get_error(self, run: TrainingRun) -> dict[str, str | None] | None:
        if run.status != Status.FAILED:
            return None
        ours = run.error_param.replace("hyperparameters.", "lorikeet.", 1)
        return {
            "code": run.error_code or "training_failed",
            "message": run.error,
            "param": _PARAMS.get(run.error_param, ours) or None,
        }

    def get_hyperparameters(self, run: TrainingRun) -> dict[str, Any]:
        return _hyperparameters(run)

    def get_method(self, run: TrainingRun) -> dict[str, Any]:
        method, found = _method(run), _hyperparameters(run)
        own = defaults_of(method)
        if method == "dpo":
            found["beta"] = run.hyperparameters.get("beta", own.beta)
        graded = {}
        if method == "reinforcement":
            graded = {"grader": run.hyperparameters["grader"]}
            samples = run.hyperparameters.get("samples", own.samples)
            found["compute_multiplier"] = _number(samples / (own.samples or 1))
            found["eval_interval"] = run.hyperparameters.get("eval_steps", "auto")
        return {"type": method, method: {**graded, "hyperparameters": found}}

    def get_seed(self, run: TrainingRun) -> int:
        return int(run.hyperparameters.get("seed", _DEFAULTS.seed))

    def get_lorikeet(self, run: TrainingRun) -> dict[str, Any]:
        curves = ("losses", "validation_losses")
        progress = {name: value for name, value in run.progress.items() if name not in curves}
        waits_until = picking.window_opens_at() if run.status == Status.QUEUED else None
        return {
            "training_run": str(run.pk),
            "adapter": run.adapter.name,
            "dataset": run.dataset.name if run.dataset else None,
            "hyperparameters": run.hyperparameters,
            "progress": progress,
            "attempts": run.attempts,
            "waits_until": waits_until and waits_until.isoformat(),
        }


class FineTuningEventSerializer(serializers.Serializer[TrainingEvent]):
    """An event of a job, as OpenAI writes it."""

    id = PublicId(TrainingEvent.PREFIX)
    object = Constant("fine_tuning.job.event")
    created_at = UnixTime()
    level = serializers.CharField()
    message = serializers.CharField()
    type = serializers.CharField(source="kind")
    data = DescribedField(_OBJECT)  # type: ignore[assignment]


class FineTuningCheckpointSerializer(serializers.Serializer[Checkpoint]):
    """A model that a job made, on its way or as its result, as OpenAI writes it."""

    id = serializers.SerializerMethodField()
    object = Constant("fine_tuning.job.checkpoint")
    created_at = UnixTime()
    fine_tuned_model_checkpoint = serializers.CharField(source="model")
    fine_tuning_job_id = serializers.CharField(source="job_id")
    step_number = serializers.IntegerField(source="step")
    metrics = DescribedField(_OBJECT)  # type: ignore[assignment]

    def get_id(self, checkpoint: Checkpoint) -> str:
        return public_id(CHECKPOINT_PREFIX, checkpoint.version_id)
