"""A job of `contract.training` as the batch takes it: settings, and rows as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.training import Hyperparameters, JobError, TrainJob
from engine.training.active import steps_per_epoch
from engine.training.run import RunRequest, RunRows, RunSettings
from worker.training.chat_data import IGNORED, Example, load_examples


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
    """What the present trainer makes of these hyperparameters (`worker.training.loop`)."""
    return RunSettings(
        rank=hyper.rank,
        alpha=hyper.alpha,
        target_modules=hyper.target_modules,
        steps=steps,
        batch_size=hyper.batch_size,
        learning_rate=hyper.learning_rate,
        warmup_steps=min(hyper.warmup_steps, steps // 2),
        seed=hyper.seed,
    )


def prepare(named: NamedJob, tokenizer: Any) -> PreparedJob:
    """Read a job's rows. Raises DatasetError."""
    hyper = named.job.hyperparameters
    examples = load_examples(tokenizer, named.job.dataset, hyper.max_length)
    per_epoch = steps_per_epoch(len(examples), hyper.batch_size)
    steps = hyper.max_steps or max(1, round(per_epoch * hyper.epochs))
    tokens_per_epoch = sum(len(example.input_ids) for example in examples)
    return PreparedJob(
        named=named,
        request=RunRequest(
            run_id=named.name,
            tenant=named.name,  # so that all jobs take turns
            rows=_rows(examples),
            settings=settings_of(hyper, steps),
        ),
        started={
            "rows": len(examples),
            "truncated_rows": sum(example.is_truncated for example in examples),
            "tokens": round(tokens_per_epoch * steps / per_epoch),
            "steps": steps,
        },
    )


def _rows(examples: list[Example]) -> RunRows:
    return RunRows.of(
        (example.input_ids, [label != IGNORED for label in example.labels]) for example in examples
    )


def load_tokenizer(folder: Path) -> Any:
    """The base's tokenizer. Raises JobError unless it can be trained with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template or not tokenizer.is_fast:
        raise JobError("base_model_dir", "the tokenizer needs a chat template and a fast tokenizer")
    return tokenizer
