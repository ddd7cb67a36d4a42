"""What `worker.train` is asked to do. Standard library only, so a wrong job is refused at once."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_JOB_BYTES = 1 << 20


class JobError(ValueError):
    """Raised when a job cannot be run as it is written; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """How to train. Raises JobError when a value is out of its range."""

    rank: int = 16
    alpha: float = 32.0
    #: Names of linear layers inside the decoder layers.
    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    epochs: float = 1.0
    max_steps: int | None = None  # ends training early, or repeats the data to get there
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    max_length: int = 512  # tokens of a row; longer ones are cut
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("rank", 1, 256),
            ("alpha", 0.001, 4096),
            ("epochs", 0.001, 100),
            ("max_steps", 1, 1_000_000),
            ("batch_size", 1, 256),
            ("learning_rate", 1e-7, 1.0),
            ("warmup_steps", 0, 10_000),
            ("max_length", 8, 32_768),
            ("seed", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if name == "max_steps" and value is None:
                continue
            kinds = (int, float) if name in {"alpha", "epochs", "learning_rate"} else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise JobError(f"hyperparameters.{name} must be a number from {low} to {high}")

    @classmethod
    def from_dict(cls, fields: Any) -> Hyperparameters:
        """The hyperparameters of a job file. Raises JobError on an unknown or wrong field."""
        if not isinstance(fields, dict):
            raise JobError("hyperparameters must be an object")
        unknown = sorted(set(fields) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise JobError(f"hyperparameters.{unknown[0]} is not known")
        targets = fields.get("target_modules")
        if targets is None:
            return cls(**fields)
        if (
            not isinstance(targets, list | tuple)
            or not targets
            or not all(isinstance(target, str) for target in targets)
        ):
            raise JobError("hyperparameters.target_modules must be a list of layer names")
        return cls(**{**fields, "target_modules": tuple(sorted(set(targets)))})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """What to train, from what, to where."""

    base_model_dir: Path
    dataset: Path
    output_dir: Path
    hyperparameters: Hyperparameters
    num_threads: int | None = None

    @classmethod
    def read(cls, path: Path) -> TrainJob:
        """The job in a file. Raises JobError when it is not one."""
        try:
            with path.open("rb") as file:
                fields = json.loads(file.read(MAX_JOB_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise JobError(f"the job file cannot be read: {error}") from error
        if not isinstance(fields, dict):
            raise JobError("the job must be an object")
        for name in ("base_model_dir", "dataset", "output_dir"):
            if not isinstance(fields.get(name), str) or not fields[name]:
                raise JobError(f"{name} must be a path")
        num_threads = fields.get("num_threads")
        if num_threads is not None and (type(num_threads) is not int or num_threads < 1):
            raise JobError("num_threads must be a positive number")
        job = cls(
            base_model_dir=Path(fields["base_model_dir"]),
            dataset=Path(fields["dataset"]),
            output_dir=Path(fields["output_dir"]),
            hyperparameters=Hyperparameters.from_dict(fields.get("hyperparameters", {})),
            num_threads=num_threads,
        )
        if not (job.base_model_dir / "config.json").is_file():
            raise JobError("base_model_dir: there is no model there")
        if not job.dataset.is_file():
            raise JobError("dataset: there is no such file")
        if job.output_dir.exists():
            raise JobError("output_dir: it exists already")
        return job
