"""A training job: as the API takes it, and as `python -m worker.train` reads it."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.adapters.draft_heads import MAX_HEADS

MAX_JOB_BYTES = 1 << 20
MAX_TARGETS = 16
#: Beside a kept adapter's two files: its step and losses, as JSON.
METRICS_FILE = "metrics.json"
#: Name -> (whole numbers only, least, most).
BOUNDS: dict[str, tuple[bool, float, float]] = {
    "rank": (True, 1, 256),
    "alpha": (False, 0.001, 4096),
    "epochs": (False, 0.001, 100),
    "max_steps": (True, 1, 1_000_000),
    "batch_size": (True, 1, 256),
    "learning_rate": (False, 1e-7, 1),
    "warmup_steps": (True, 0, 10_000),
    "max_length": (True, 8, 32_768),
    "seed": (True, 0, 2**31 - 1),
    "validation_share": (False, 0, 0.5),
    "eval_steps": (True, 1, 1_000_000),
    "patience": (True, 1, 1000),
    "checkpoints": (True, 0, 10),
    "gradient_accumulation": (True, 1, 256),
    "draft_heads": (True, 0, MAX_HEADS),
}
_MAY_BE_NONE = ("max_steps", "eval_steps", "patience")
_YES_OR_NO = ("truncate", "packing", "gradient_checkpointing")
_MODULE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)


class JobError(ValueError):
    """A training job cannot be run as it is written: its `field` has this `problem`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """The hyperparameters of a run. Raises JobError naming the first invalid one."""

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
    max_length: int = 512  # tokens of a row; a longer one is an error unless `truncate`
    truncate: bool = False  # cut longer rows
    seed: int = 0
    validation_share: float = 0.0  # share of the prompts to validate with
    eval_steps: int | None = None  # between two validations; None: ten in all
    patience: int | None = None  # validations without a better loss, after which training ends
    checkpoints: int = 0  # adapters on the way that are kept, evenly over the steps
    packing: bool = False  # accepted without effect: rows are never padded
    gradient_accumulation: int = 1  # batches of a step
    gradient_checkpointing: bool = False  # on a CPU: a GPU's memory decides what is kept
    draft_heads: int = 0  # trained after the LoRA, to guess the tokens behind the next one

    def __post_init__(self) -> None:
        for name in BOUNDS:
            value = getattr(self, name)
            if name not in _MAY_BE_NONE or value is not None:
                _check_number(name, value)
        for name in _YES_OR_NO:
            if type(getattr(self, name)) is not bool:
                raise JobError(f"hyperparameters.{name}", "must be true or false")

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation

    @classmethod
    def from_dict(cls, fields: Any) -> Hyperparameters:
        """Return the hyperparameters of a JSON object; what it leaves out takes its default."""
        if not isinstance(fields, dict):
            raise JobError("hyperparameters", "must be an object")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                problem = f"is not a hyperparameter; there are: {', '.join(known)}"
                raise JobError(f"hyperparameters.{name[:64]}", problem)
        if "target_modules" not in fields:
            return cls(**fields)
        _check_targets(fields["target_modules"])
        targets = tuple(sorted(set(fields["target_modules"])))
        return cls(**{**fields, "target_modules": targets})


def _check_number(name: str, value: Any) -> None:
    is_whole, least, most = BOUNDS[name]
    types: tuple[type, ...] = (int,) if is_whole else (int, float)
    # Written so that NaN, which compares with nothing, is refused.
    if type(value) not in types or not least <= value <= most:
        kind = "a whole number" if is_whole else "a number"
        problem = f"must be {kind} from {least:g} to {most:g}"
        raise JobError(f"hyperparameters.{name}", problem)


def _check_targets(value: Any) -> None:
    field = "hyperparameters.target_modules"
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TARGETS:
        raise JobError(field, f"must be a list of 1 to {MAX_TARGETS} layer names")
    for index, name in enumerate(value):
        if not isinstance(name, str) or not _MODULE_NAME.fullmatch(name):
            raise JobError(f"{field}.{index}", "must be the name of a linear layer")


def _check_fields(fields: dict[str, Any]) -> None:
    """Check the form of a job's fields, but for its hyperparameters. Raises JobError."""
    for name in ("base_model_dir", "dataset", "output_dir"):
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise JobError(name, "must be a path")
    for name in ("num_threads", "most_steps", "most_tokens"):
        number = fields.get(name)
        if number is not None and (type(number) is not int or number < 1):
            raise JobError(name, "must be a positive number")
    gpu_share = fields.get("gpu_share")
    if gpu_share is not None and not (type(gpu_share) is float and 0.0 < gpu_share <= 1.0):
        raise JobError("gpu_share", "must be a number above 0, at most 1")
    for name in ("validation_dataset", "warm_start", "kept_dir", "judge_dir"):
        path = fields.get(name)
        if path is not None and (not isinstance(path, str) or not path):
            raise JobError(name, "must be a path")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """The model to train, its data and its output folder: the content of JOB.json."""

    base_model_dir: Path
    dataset: Path
    output_dir: Path
    hyperparameters: Hyperparameters
    num_threads: int | None = None
    #: What the adapter says it is for; empty: what the folder says.
    base_model: str = ""
    #: The most of the GPU's memory that it may take, from 0 to 1; None: all there is.
    gpu_share: float | None = None
    #: The most steps that it may make, and tokens that it may read.
    most_steps: int | None = None
    most_tokens: int | None = None
    #: Rows to validate with; None: a share of the dataset's, chosen with the salt, or none.
    validation_dataset: Path | None = None
    salt: str = ""
    #: An adapter_model.safetensors to begin from, with the hyperparameters' rank, alpha and target
    #: modules; None: PEFT's initial adapter.
    warm_start: Path | None = None
    #: Where the adapters of `checkpoints` steps are kept; None: nowhere.
    kept_dir: Path | None = None
    #: The expected answers that a batch scores the adapter by: `contract.training.judging`; None:
    #: none.
    judge_dir: Path | None = None

    def write(self, path: Path) -> None:
        """Write the job where `read` finds it."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=lambda of: str(of.resolve())))

    @property
    def has_validation(self) -> bool:
        """Return whether some rows are kept to validate with."""
        return self.validation_dataset is not None or self.hyperparameters.validation_share > 0

    @classmethod
    def read(cls, path: Path) -> TrainJob:
        """Return the job in a file. Raises JobError when it is not one."""
        try:
            with path.open("rb") as file:
                fields = json.loads(file.read(MAX_JOB_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise JobError("the job file", f"cannot be read: {error}") from error
        if not isinstance(fields, dict):
            raise JobError("the job", "must be an object")
        _check_fields(fields)
        validation, warm_start = fields.get("validation_dataset"), fields.get("warm_start")
        kept_dir, judge_dir = fields.get("kept_dir"), fields.get("judge_dir")
        job = cls(
            base_model_dir=Path(fields["base_model_dir"]),
            dataset=Path(fields["dataset"]),
            output_dir=Path(fields["output_dir"]),
            hyperparameters=Hyperparameters.from_dict(fields.get("hyperparameters", {})),
            num_threads=fields.get("num_threads"),
            base_model=str(fields.get("base_model") or ""),
            gpu_share=fields.get("gpu_share"),
            most_steps=fields.get("most_steps"),
            most_tokens=fields.get("most_tokens"),
            validation_dataset=Path(validation) if validation else None,
            salt=str(fields.get("salt") or ""),
            warm_start=Path(warm_start) if warm_start else None,
            kept_dir=Path(kept_dir) if kept_dir else None,
            judge_dir=Path(judge_dir) if judge_dir else None,
        )
        if not (job.base_model_dir / "config.json").is_file():
            raise JobError("base_model_dir", "there is no model there")
        for name, read in (
            ("dataset", job.dataset),
            ("validation_dataset", job.validation_dataset),
            ("warm_start", job.warm_start),
        ):
            if read is not None and not read.is_file():
                raise JobError(name, "there is no such file")
        if job.output_dir.exists():
            raise JobError("output_dir", "it exists already")
        return job
