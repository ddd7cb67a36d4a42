"""A job of `contract.training` as the batch takes it: settings, and rows as tokens."""

from __future__ import annotations

from dataclasses import dataclass

from contract.training import Hyperparameters, TrainJob
from engine.model.config import ModelConfig
from engine.text.codec import TextCodec
from engine.training.parameters import AdapterLayout
from engine.training.run import HeldOut, RunRequest, RunRows, RunSettings
from worker.batch_training.warm_start import read_warm_start
from worker.training.chat_data import load_data
from worker.training.example_store import IGNORED, ExampleStore
from worker.training.loop import planned
from worker.training.validation import interval


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
    """Read a job's rows, and the adapter that it begins from. Raises DatasetError, JobError."""
    job = named.job
    hyper = job.hyperparameters
    data = load_data(codec, job)
    started = planned(data, job)
    settings, adapter, held_out = settings_of(hyper, started["steps"]), None, None
    if job.warm_start is not None:
        layout = AdapterLayout(ModelConfig.from_folder(job.base_model_dir), settings)
        adapter = read_warm_start(job.warm_start, layout)
    if job.has_validation:
        held_out = HeldOut(
            rows=_rows(data.validation),
            every=interval(settings.steps, hyper.eval_steps),
            patience=hyper.patience,
        )
    return PreparedJob(
        named=named,
        request=RunRequest(
            run_id=named.name,
            tenant=named.name,  # so that all jobs take turns
            rows=_rows(data.examples),
            settings=settings,
            adapter=adapter,
            held_out=held_out,
        ),
        started=started,
    )


def _rows(examples: ExampleStore) -> RunRows:
    return RunRows.of(
        (example.input_ids, [label != IGNORED for label in example.labels]) for example in examples
    )
