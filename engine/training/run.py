"""A training run as it is asked for: its settings and its rows."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch

from contract.adapters.peft_config import UPLOAD_LIMITS
from contract.ranges import Range, ranges_of
from contract.training.job import RANGES
from engine.model.config import ModelConfig
from engine.training.errors import RunRefused

#: Linears that an adapter may change.
LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
#: Those of a gated delta net.
DELTA_LINEARS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
_BELOW_ONE = math.nextafter(1.0, 0.0)

Schedule = Literal["cosine", "linear", "constant"]
Order = Literal["group_by_length", "shuffled", "given"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of one adapter's training, with the names and meanings of PEFT and its Trainer.

    Those that are hyperparameters of `contract.training.job` have the ranges from there.

    steps                  optimiser steps in all
    batch_size             rows of a batch; `gradient_accumulation` batches make one step, whose
                           loss is the mean over the answer tokens of all its rows
    schedule               of the learning rate: up to `learning_rate` in `warmup_steps`, then down
                           to 0 at `steps` (constant: not down)
    max_grad_norm          0: gradients are not clipped
    order                  of the rows in an epoch; the first two are the Trainer's own, by `seed`
    seed                   of the initial adapter, the order and the dropout
    beta                   of preference tuning (DPO), where the rows are pairs: each better answer
                           is followed by the worse one; None: the rows' answers are learned.
                           With `samples` the weight of the distance to the start
    samples                of each row, which is a prompt, answers are sampled and rewarded:
                           `engine.training.policy`. None: the rows have answers
    max_tokens, clip       of answers that are sampled
    use_dora … layers      known by name, so that `unsupported` can refuse them
    """

    rank: int = 16
    # wider than the hyperparameter's: an uploaded adapter that is judged has its own
    alpha: Annotated[float, Range(1e-6, UPLOAD_LIMITS.max_alpha)] = 32.0
    use_rslora: bool = False
    target_modules: tuple[str, ...] = LINEARS
    steps: Annotated[int, Range(1, 10_000_000)] = 1
    batch_size: int = 8
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    weight_decay: Annotated[float, Range(0, 1e6)] = 0.0
    beta1: Annotated[float, Range(0, _BELOW_ONE)] = 0.9
    beta2: Annotated[float, Range(0, _BELOW_ONE)] = 0.999
    epsilon: Annotated[float, Range(0, 1)] = 1e-8
    max_grad_norm: Annotated[float, Range(0, 1e30)] = 1.0
    dropout: Annotated[float, Range(0, _BELOW_ONE)] = 0.0
    order: Order = "group_by_length"
    seed: int = 0
    beta: float | None = None
    samples: int | None = None
    max_tokens: int | None = None
    clip: float | None = None
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    trainable_token_ids: tuple[int, ...] = ()
    init_lora_weights: bool | str = True
    layers: tuple[int, ...] | None = None

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation

    @property
    def rows_per_example(self) -> int:
        """Rows of what `batch_size` counts: two of a pair."""
        return 2 if self.has_pairs else 1

    @property
    def has_pairs(self) -> bool:
        return self.beta is not None and self.samples is None

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def check(self) -> None:
        """Raise RunRefused naming the first value that is out of its range."""
        for name, allowed in _RANGES.items():
            if not allowed.has(getattr(self, name)):
                raise RunRefused(f"{name} must be {allowed}", param=name)
        for name, known in (("schedule", _SCHEDULES), ("order", _ORDERS)):
            if getattr(self, name) not in known:
                raise RunRefused(f"{name} is not one of {', '.join(known)}", param=name)
        if not self.target_modules:
            raise RunRefused("target_modules is empty", param="target_modules")


_SCHEDULES, _ORDERS = ("cosine", "linear", "constant"), ("group_by_length", "shuffled", "given")
_RANGES = {name: RANGES[name] for name in RANGES if hasattr(RunSettings, name)}
_RANGES |= ranges_of(RunSettings)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field of a run's settings that the trainer does not do, and why."""

    field: str
    reason: str


def unsupported(settings: RunSettings) -> Unsupported | None:
    """Return the first setting that the trainer does not support; None: it supports all."""
    known = sorted((*LINEARS, *DELTA_LINEARS))
    unknown = [name for name in settings.target_modules if name not in known]
    targets = f"{unknown[0]!r} is not one of {', '.join(known)}" if unknown else ""
    checks = {
        "use_dora": (settings.use_dora, "DoRA needs the norm of the merged weight at each step"),
        "lora_bias": (settings.lora_bias, "the batch trains A and B alone"),
        "bias": (settings.bias != "none", "the batch trains no biases of the base"),
        "modules_to_save": (bool(settings.modules_to_save), "the batch copies no base modules"),
        "trainable_token_ids": (bool(settings.trainable_token_ids), "the batch trains no rows"),
        "init_lora_weights": (settings.init_lora_weights is not True, "the batch has PEFT's own"),
        "dropout": (settings.dropout > 0, "the batch drops nothing yet"),
        "layers": (settings.layers is not None, "the batch adapts every layer"),
        "target_modules": (bool(unknown), targets),
    }
    for name, (is_asked, reason) in checks.items():
        if is_asked:
            return Unsupported(name, reason)
    return None


class RunRows:
    """The rows of one run, one behind the other, at least one token each.

    token_ids  [N] int32, on the host, perhaps of a file
    is_answer  [N] bool: the token carries a loss; a row's first never does
    """

    def __init__(
        self, token_ids: torch.Tensor, is_answer: torch.Tensor, lengths: Sequence[int]
    ) -> None:
        self.token_ids, self.is_answer = token_ids, is_answer
        self.lengths = list(lengths)
        self.starts = [0]
        for length in self.lengths:
            self.starts.append(self.starts[-1] + length)
        # The marks are not copied: there may be more of them than fit into memory.
        marks = is_answer.view(torch.uint8).numpy()
        starts = np.array(self.starts[:-1], dtype=np.int64)
        self.num_answers: list[int] = np.add.reduceat(marks, starts, dtype=np.int64).tolist()

    @classmethod
    def of(cls, rows: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> RunRows:
        """Make rows from pairs of token ids and marks; the answer's tokens are marked true."""
        tokens: list[torch.Tensor] = []
        answers: list[torch.Tensor] = []
        for token_ids, is_answer in rows:
            if not token_ids or len(token_ids) != len(is_answer):
                counts = f"{len(is_answer)} loss marks for {len(token_ids)} tokens"
                raise RunRefused(f"row {len(tokens)} has {counts}", param="rows")
            tokens.append(torch.tensor(token_ids, dtype=torch.int32))
            marks = torch.tensor(is_answer, dtype=torch.bool)
            marks[:1] = False  # nothing predicts it
            answers.append(marks)
        if not tokens:
            raise RunRefused("there are no rows", param="rows")
        return cls(torch.cat(tokens), torch.cat(answers), [len(row) for row in tokens])

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def digest(self) -> str:
        """The name of the rows: of their tokens, their answers and where they begin."""
        digest = hashlib.sha256()
        for values in (self.token_ids, self.is_answer, torch.tensor(self.lengths)):
            digest.update(values.contiguous().numpy().data.cast("B"))
        return digest.hexdigest()

    def check(
        self, config: ModelConfig, rows_per_example: int = 1, *, are_prompts: bool = False
    ) -> None:
        """Raise RunRefused naming a row that cannot be trained on."""
        if not self.lengths:
            raise RunRefused("there are no rows", param="rows")
        if len(self) % rows_per_example:
            raise RunRefused(f"{len(self)} rows are no pairs", param="rows")
        for index, (length, answers) in enumerate(zip(self.lengths, self.num_answers, strict=True)):
            if length > config.max_positions:
                problem = f"row {index} has {length} tokens; the model has {config.max_positions}"
                raise RunRefused(f"{problem} positions", param="rows")
            if not answers and not are_prompts:
                raise RunRefused(f"row {index} has no answer to learn", param="rows")
        if not 0 <= int(self.token_ids.min()) <= int(self.token_ids.max()) < config.vocab_size:
            raise RunRefused("a token id is outside the vocabulary", param="rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Rows that a run is validated with; the state with the least loss on them is its result.

    every     steps between two validations; the last step is always followed by one
    patience  validations without a better loss, after which the run ends; None: it never ends early
    """

    rows: RunRows
    every: int
    patience: int | None = None

    def check(
        self, config: ModelConfig, rows_per_example: int = 1, *, are_prompts: bool = False
    ) -> None:
        """Raise RunRefused naming what is wrong."""
        self.rows.check(config, rows_per_example, are_prompts=are_prompts)
        for name, value in (("every", self.every), ("patience", self.patience)):
            if value is not None and value < 1:
                raise RunRefused(f"{name} is {value}, not 1 or more", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run to be trained.

    tenant    takes turns with the others; nothing else is made of it
    adapter   tensors to start from, by PEFT's names; None: PEFT's initial ones
    held_out  None: it is not validated, and its last state is its result
    """

    run_id: str
    rows: RunRows
    settings: RunSettings
    tenant: str = ""
    adapter: Mapping[str, torch.Tensor] | None = field(default=None, repr=False)
    held_out: HeldOut | None = None
