"""Write the file of a job's metrics: a CSV with OpenAI's columns, and some of ours."""

from __future__ import annotations

import csv
import io
from typing import Any

from django.db import transaction

from controlplane.files.models import File, Purpose
from controlplane.files.services import (
    FileForm,
    file_begin,
    file_drop,
    file_publish,
    file_writer,
    file_written,
)
from controlplane.training.models import TrainingEvent, TrainingRun

#: The trainer measures no accuracy of tokens: those columns are empty.
COLUMNS = (
    "step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy",
    "learning_rate", "trained_tokens", "tokens_per_s",
)  # fmt: skip
#: The further columns of a run of preferences, and of one by reinforcement.
REWARDS = {
    "dpo": ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
    "reinforcement": (
        "reward", "reward_spread", "kl", "entropy", "clipped", "mismatch", "mismatch_share",
        "answer_tokens", "cut_answers",
    ),
}  # fmt: skip
_MAX_BYTES = 1024**2


class _IsMade(Exception):
    """Raised when another process was faster."""


def result_file_make(run: TrainingRun) -> None:
    """Make the metrics file of a job that is about to succeed; a repeated call does nothing.

    Other runs have none. Raises storage.STORAGE_ERRORS.
    """
    rows = TrainingRun.objects.allowed().filter(
        pk=run.pk, result_file_id=None, status=TrainingRun.Status.PUBLISHING
    )
    if run.training_file_id is None or not rows.exists():
        return
    file = file_begin(max_bytes=0, is_bounded=False)
    writer = file_writer(file, max_bytes=_MAX_BYTES)
    form = FileForm(purpose=Purpose.FINE_TUNE_RESULTS, filename="step_metrics.csv")
    try:
        writer.write(_table(run).encode())
        file_written(file, form, writer)
        _publish(file, rows)
    except BaseException as error:
        writer.abort()
        file_drop(file)
        if not isinstance(error, _IsMade):
            raise


@transaction.atomic
def _publish(file: File, rows: Any) -> None:
    if not rows.update(result_file_id=file.pk):
        raise _IsMade
    file_publish(file)


def _table(run: TrainingRun) -> str:
    text = io.StringIO()
    rewards = REWARDS.get(run.hyperparameters.get("method", ""), ())
    columns = (*COLUMNS, *rewards, *(f"validation_{name}" for name in rewards))
    table = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    metrics = run.events.filter(kind=TrainingEvent.Kind.METRICS).order_by("pk")
    for data in metrics.values_list("data", flat=True):
        table.writerow(data)
    return text.getvalue()
