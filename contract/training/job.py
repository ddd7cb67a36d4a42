"""A training job: as the API takes it, and as `python -m worker.train` reads it."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from contract.adapters.draft_heads import MAX_HEADS
from contract.adapters.peft_config import MAX_RANK
from contract.grading.graders import BadGrader, check_grader
from contract.ranges import Range, ranges_of

MAX_JOB_BYTES = 1 << 20
MAX_TARGETS = 16
#: Beside a kept adapter's two files: its step and losses, as JSON.
METRICS_FILE = "metrics.json"
_AT_LEAST_ONE = Range(1, 2**63 - 1)
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

    # dpo: of two answers the better one is preferred; reinforcement: sampled answers are graded
    method: str = "supervised"
    # the strength with which these two keep the model near its start
    beta: Annotated[float | None, Range(0.001, 10)] = None
    # for reinforcement: `contract.grading.graders`, answers of each prompt, and their most tokens
    grader: dict[str, Any] | None = None
    samples: Annotated[int | None, Range(2, 64)] = None
    max_tokens: Annotated[int | None, Range(1, 8192)] = None
    # how far a token's probability may leave that of the sampler, as a share of it
    clip: Annotated[float | None, Range(0.01, 1)] = None
    rank: Annotated[int, Range(1, MAX_RANK)] = 16
    alpha: Annotated[float, Range(0.001, 4096)] = 32.0
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
    epochs: Annotated[float, Range(0.001, 100)] = 1.0
    # ends training early, or repeats the data to get there
    max_steps: Annotated[int | None, Range(1, 1_000_000)] = None
    batch_size: Annotated[int, Range(1, 256)] = 8
    learning_rate: Annotated[float, Range(1e-7, 1)] = 1e-3
    warmup_steps: Annotated[int, Range(0, 10_000)] = 5
    # tokens of a row; a longer one is an error unless `truncate`
    max_length: Annotated[int, Range(8, 32_768)] = 512
    truncate: bool = False  # cut longer rows
    skip_thoughts: bool = False  # thoughts are only context, and not learned
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    validation_share: Annotated[float, Range(0, 0.5)] = 0.0  # share of the prompts
    # between two validations; None: ten in all
    eval_steps: Annotated[int | None, Range(1, 1_000_000)] = None
    # validations without a better loss, after which training ends
    patience: Annotated[int | None, Range(1, 1000)] = None
    checkpoints: Annotated[int, Range(0, 10)] = 0  # adapters kept on the way, at even distances
    gradient_accumulation: Annotated[int, Range(1, 256)] = 1  # batches of a step
    gradient_checkpointing: bool = False  # on a CPU: a GPU's memory decides what is kept
    # trained after the LoRA, to guess the tokens behind the next one
    draft_heads: Annotated[int, Range(0, MAX_HEADS)] = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in RANGES and not RANGES[name].has(value):
                raise JobError(f"hyperparameters.{name}", f"must be {RANGES[name]}")
            if field.type == "bool" and type(value) is not bool:
                raise JobError(f"hyperparameters.{name}", "must be true or false")
        if self.method not in tuple(METHODS):  # a list is not hashable
            raise JobError("hyperparameters.method", f"must be {' or '.join(METHODS)}")
        self._check_method()

    def _check_method(self) -> None:
        for name, methods in _OF_METHODS.items():
            is_given, is_needed = getattr(self, name) is not None, self.method in methods
            if is_given and not is_needed:
                problem = f"is for the method {' or '.join(methods)}: leave it out"
                raise JobError(f"hyperparameters.{name}", problem)
            if is_needed and not is_given:
                wanted = RANGES.get(name, "given: see the documentation of graders")
                raise JobError(f"hyperparameters.{name}", f"must be {wanted}")
        if self.method != "supervised" and self.draft_heads:
            raise JobError("hyperparameters.draft_heads", "learn chats alone: leave them out")
        if self.grader is not None:
            try:
                check_grader(self.grader, "hyperparameters.grader")
            except BadGrader as error:
                raise JobError(error.field, error.problem) from None

    @property
    def rows_per_example(self) -> int:
        """Rows of tokens of a dataset's row: two of a pair."""
        return 2 if self.method == "dpo" else 1

    def most_tokens(self, prompt_tokens: int) -> int:
        """Return the most tokens that are trained on of a row, whose own are given."""
        if self.samples is None or self.max_tokens is None:
            return prompt_tokens * self.rows_per_example
        return self.samples * (prompt_tokens + self.max_tokens)

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation

    def steps_per_epoch(self, num_rows: int) -> int:
        return -(-num_rows // self.rows_per_step)

    def num_steps(self, num_rows: int) -> int:
        return self.max_steps or max(1, round(self.steps_per_epoch(num_rows) * self.epochs))

    @classmethod
    def from_dict(cls, fields: Any) -> Hyperparameters:
        """Return the hyperparameters of a JSON object; what it leaves out takes its default.

        The defaults are those of its method.
        """
        if not isinstance(fields, dict):
            raise JobError("hyperparameters", "must be an object")
        method = fields.get("method", "supervised")
        own = METHODS.get(method, {}) if isinstance(method, str) else {}
        fields = own | {
            name: value for name, value in fields.items() if value is not None or name not in own
        }
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


#: The methods of training, and the defaults that differ from those of supervised training.
METHODS: dict[str, dict[str, Any]] = {
    "supervised": {},
    "dpo": {"beta": 0.1, "learning_rate": 1e-4},
    "reinforcement": {
        "beta": 0.01, "learning_rate": 1e-4, "samples": 8, "max_tokens": 256, "clip": 0.2,
    },
}  # fmt: skip
#: Hyperparameters that some methods have, and the others do not.
_OF_METHODS = {
    "beta": ("dpo", "reinforcement"),
    "grader": ("reinforcement",),
    "samples": ("reinforcement",),
    "max_tokens": ("reinforcement",),
    "clip": ("reinforcement",),
}
RANGES = ranges_of(Hyperparameters)


def defaults_of(method: str) -> Hyperparameters:
    """Return the default hyperparameters of a method; a grader has none, so any stands there."""
    graded = {"grader": _ANY_GRADER} if method == "reinforcement" else {}
    return Hyperparameters.from_dict({"method": method, **graded})


_ANY_GRADER = {"type": "string_check", "input": "", "reference": "", "operation": "eq"}


def _check_targets(value: Any) -> None:
    field = "hyperparameters.target_modules"
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TARGETS:
        raise JobError(field, f"must be a list of 1 to {MAX_TARGETS} layer names")
    for index, name in enumerate(value):
        if not isinstance(name, str) or not _MODULE_NAME.fullmatch(name):
            raise JobError(f"{field}.{index}", "must be the name of a linear layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """The model to train, its data and its output folder: the content of JOB.json."""

    base_model_dir: Path
    dataset: Path
    output_dir: Path
    hyperparameters: Hyperparameters = Hyperparameters()
    num_threads: Annotated[int | None, _AT_LEAST_ONE] = None
    #: What the adapter says it is for; empty: what the folder says.
    base_model: str = ""
    #: The most of the GPU's memory that it may take, from 0 to 1; None: all there is.
    gpu_share: Annotated[float | None, Range(0, 1, is_open=True)] = None
    #: The most steps that it may make, and tokens that it may read.
    most_steps: Annotated[int | None, _AT_LEAST_ONE] = None
    most_tokens: Annotated[int | None, _AT_LEAST_ONE] = None
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
    #: Where the method reinforcement writes answers and finds their rewards:
    #: `contract.training.rewards`.
    rewards_dir: Path | None = None

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
        job = cls(
            **{
                field.name: _read_field(field, fields.get(field.name))
                for field in dataclasses.fields(cls)
                if fields.get(field.name) is not None or field.default is dataclasses.MISSING
            }
        )
        if not (job.base_model_dir / "config.json").is_file():
            raise JobError("base_model_dir", "there is no model there")
        for name in ("dataset", "validation_dataset", "warm_start"):
            path = getattr(job, name)
            if path is not None and not path.is_file():
                raise JobError(name, "there is no such file")
        if job.hyperparameters.grader is not None and job.rewards_dir is None:
            raise JobError("rewards_dir", "it is needed for the method reinforcement")
        if job.output_dir.exists():
            raise JobError("output_dir", "it exists already")
        return job


_JOB_RANGES = ranges_of(TrainJob)


def _read_field(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of a job's field, from JSON. Raises JobError."""
    if field.type == "Hyperparameters":
        return Hyperparameters.from_dict(value)
    if field.name in _JOB_RANGES:
        if not _JOB_RANGES[field.name].has(value):
            raise JobError(field.name, f"must be {_JOB_RANGES[field.name]}")
        return value
    is_path = field.type != "str"
    if not isinstance(value, str) or (is_path and not value):
        raise JobError(field.name, "must be a path" if is_path else "must be text")
    return Path(value) if is_path else value
