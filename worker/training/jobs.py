"""A job of `contract.training.job` as the batch takes it: settings, and rows as tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from contract.training.job import Hyperparameters, JobError, TrainJob
from engine.model.config import ModelConfig
from engine.text.codec import TextCodec
from engine.training.parameters import AdapterLayout
from engine.training.run import HeldOut, RunRequest, RunSettings, unsupported
from worker.training.chat_data import Examples, load_data
from worker.training.warm_start import read_warm_start

#: Validations of a training whose interval is not given.
_NUM_EVALS = 10


@dataclass(frozen=True, slots=True)
class NamedJob:
    """A job, and the name under which its events go out."""

    name: str
    job: TrainJob


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job whose rows were read.

    started  the fields of its event `started` but for the trainable parameters
    lines, validation_lines  of prompts: the line of each row
    """

    named: NamedJob
    request: RunRequest
    started: dict[str, int]
    lines: list[int] = dataclasses.field(default_factory=list)
    validation_lines: list[int] = dataclasses.field(default_factory=list)


#: Hyperparameters that the engine has under the same name.
_SAME = {field.name for field in dataclasses.fields(Hyperparameters)}.intersection(
    field.name for field in dataclasses.fields(RunSettings)
)


def settings_of(hyper: Hyperparameters, steps: int = 1) -> RunSettings:
    """Return the settings of a run with these hyperparameters."""
    settings = RunSettings(**{name: getattr(hyper, name) for name in _SAME}, steps=steps)
    return dataclasses.replace(settings, warmup_steps=min(hyper.warmup_steps, steps // 2))


def check_settings(hyper: Hyperparameters) -> None:
    """Raise JobError for hyperparameters that no run can have."""
    lack = unsupported(settings_of(hyper))
    if lack is not None:
        raise JobError(f"hyperparameters.{lack.field}", lack.reason)


def kept_steps(steps: int, number: int) -> set[int]:
    """Return the steps after which the adapter is kept: they divide the training evenly.

    Fewer than `number` where there are not as many steps; never the last, which is the result.
    """
    places = (round(steps * part / (number + 1)) for part in range(1, number + 1))
    return {step for step in places if 0 < step < steps}


def planned(data: Examples, job: TrainJob) -> dict[str, int]:
    """Return the length of the training, as its event `started` has it.

    Raises JobError if it is longer than the job may be.
    """
    hyper = job.hyperparameters
    steps = hyper.num_steps(data.num_examples)
    own = data.examples.num_tokens
    if hyper.samples is not None and hyper.max_tokens is not None:  # as many as there may be
        own = hyper.samples * (own + data.num_examples * hyper.max_tokens)
    tokens = round(own * steps / hyper.steps_per_epoch(data.num_examples))
    for name, number, most in (
        ("steps", steps, job.most_steps),
        ("tokens", tokens, job.most_tokens),
    ):
        if most is not None and number > most:
            field = "hyperparameters.max_steps" if hyper.max_steps else "hyperparameters.epochs"
            raise JobError(field, f"the run would have {number} {name}; {most} is the limit")
    return {
        "rows": data.num_rows,
        "examples": data.num_examples,
        "truncated_rows": data.num_cut,
        "dropped_rows": data.num_dropped,
        "validation_rows": data.num_validation,
        "leaked_rows": data.num_leaked,
        "tokens": tokens,
        "steps": steps,
    }


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
            rows=data.validation.rows(),
            every=hyper.eval_steps or max(1, settings.steps // _NUM_EVALS),
            patience=hyper.patience,
        )
    return PreparedJob(
        named=named,
        request=RunRequest(
            run_id=named.name,
            tenant=named.name,  # so that all jobs take turns
            rows=data.examples.rows(),
            settings=settings,
            adapter=adapter,
            held_out=held_out,
        ),
        started=started,
        lines=data.lines,
        validation_lines=data.validation_lines,
    )
