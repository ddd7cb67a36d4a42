"""A job of `contract.training` as the batch takes it: settings, and rows as tokens."""

from __future__ import annotations

from dataclasses import dataclass

from contract.training import Hyperparameters, TrainJob
from engine.training.run import RunRequest, RunRows, RunSettings
from worker.text.codec import TextCodec
from worker.training.chat_data import load_data
from worker.training.example_store import IGNORED, ExampleStore
from worker.training.loop import planned


@dataclass(frozen=True, slots=True)
class NamedJob:
    """A job, and the name under which its events go out."""

    name: str
    job: TrainJob


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job whose rows were read.

    started  the fields of its event `started` but for the trainable parameters
    """

    named: NamedJob
    request: RunRequest
    started: dict[str, int]


def settings_of(hyper: Hyperparameters, steps: int = 1) -> RunSettings:
    """What the present trainer makes of these hyperparameters (`worker.training.loop`).

    The batch pads nothing, whatever `packing` says, and keeps the activations that it has room for.
    """
    return RunSettings(
        rank=hyper.rank,
        alpha=hyper.alpha,
        target_modules=hyper.target_modules,
        steps=steps,
        batch_size=hyper.batch_size,
        gradient_accumulation=hyper.gradient_accumulation,
        learning_rate=hyper.learning_rate,
        warmup_steps=min(hyper.warmup_steps, steps // 2),
        seed=hyper.seed,
    )


def prepare(named: NamedJob, codec: TextCodec) -> PreparedJob:
    """Read a job's rows. Raises DatasetError, JobError."""
    hyper = named.job.hyperparameters
    data = load_data(codec, named.job)
    started = planned(data, named.job)
    return PreparedJob(
        named=named,
        request=RunRequest(
            run_id=named.name,
            tenant=named.name,  # so that all jobs take turns
            rows=_rows(data.examples),
            settings=settings_of(hyper, started["steps"]),
        ),
        started=started,
    )


def _rows(examples: ExampleStore) -> RunRows:
    return RunRows.of(
        (example.input_ids, [label != IGNORED for label in example.labels]) for example in examples
    )
