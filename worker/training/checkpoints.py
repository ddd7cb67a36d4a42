"""A training's state on the disk: another process goes on where this one was killed.

The state after a step is the adapter, AdamW's moments, the schedule, the random numbers that give
the order of the rows, and what was told so far. All else follows from the job, so the steps after
it are those that an undisturbed training makes, on a CPU to the bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from contract.training import LATER, Hyperparameters, TrainJob
from worker.training.validation import Validation

_ADAPTER, _BEST = "adapter.", "best."
_RANDOM, _EPOCH_RANDOM = "random", "epoch_random"
_OPTIMIZER = "optimizer."
_DEFAULTS = Hyperparameters()
Emit = Callable[..., None]


class TrainingStopped(Exception):
    """The training was ended from outside, and its state is on the disk."""


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """The state after a step.

    tensors  by name: the adapter, the best one of validation, the optimizer's, random states
    state    the rest: JSON
    """

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["trainer"]["global_step"])

    def part(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors whose name begins with `prefix`, by the rest of their name."""
        named = self.tensors.items()
        return {name[len(prefix) :]: tensor for name, tensor in named if name.startswith(prefix)}

    @property
    def is_final(self) -> bool:
        """Whether it is the LoRA of the result, and what is left are the draft heads."""
        return bool(self.state.get("is_final"))

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are: else the next loss is NaN."""
        floats = (tensor for tensor in self.tensors.values() if tensor.is_floating_point())
        return all(bool(torch.isfinite(tensor).all()) for tensor in floats)

    def write(self, path: Path) -> None:
        """Replace the file at `path`, whole or not at all. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_suffix(".part")
        try:
            save_file(self.tensors, staged, metadata={"training": json.dumps(self.state)})
            with staged.open("rb") as file:
                os.fsync(file.fileno())
        except SafetensorError as error:  # what the library makes of an OSError
            raise OSError(str(error)) from error
        staged.replace(path)

    @classmethod
    def read(cls, path: Path) -> SavedTraining | None:
        """Return the state in a file; None: there is none that can be read."""
        try:
            with safe_open(path, framework="pt") as file:
                state = json.loads(file.metadata()["training"])
                return cls({name: file.get_tensor(name) for name in file.keys()}, state)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None


def fingerprint(job: TrainJob, plan: Mapping[str, int]) -> str:
    """Return what a state must agree in with a job to be its: how it trains, on how many rows."""
    hyper = dataclasses.asdict(job.hyperparameters)
    for name in LATER:  # a state of the release before has none of these
        if hyper[name] == getattr(_DEFAULTS, name):
            del hyper[name]
    told = json.dumps([hyper, dict(plan)], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


class Checkpoints(TrainerCallback):
    """Writes the state every `job.checkpoint_s` seconds, in a thread; one at a time.

    Add it after the callbacks whose state it saves: `validation`, and the one that has `losses`.
    found        the state that the training goes on from
    has_stopped  whether `stop` has ended it
    """

    def __init__(
        self,
        job: TrainJob,
        plan: Mapping[str, int],
        emit: Emit,
        validation: Validation,
        losses: list[float],
    ) -> None:
        self._path, self._every_s, self._emit = job.checkpoint, job.checkpoint_s, emit
        self._validation, self._losses = validation, losses
        self._job = fingerprint(job, plan)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: tuple[int, Future[None]] | None = None
        self._saved_at = time.monotonic()
        self._epoch_random = torch.get_rng_state()
        self._is_told = False  # that it could not be written
        self._is_to_stop = self.has_stopped = False
        #: Takes the state after the last step; set once there is one.
        self._take: Callable[[], SavedTraining | None] | None = None
        found = None if self._path is None else SavedTraining.read(self._path)
        self.found = found if found is not None and found.state.get("job") == self._job else None

    @property
    def step(self) -> int:
        """The steps that were made before this process."""
        return 0 if self.found is None else self.found.step

    def stop(self) -> None:
        """End the training after the step that is under way; its state is written."""
        self._is_to_stop = True

    @property
    def is_to_stop(self) -> bool:
        """Whether `stop` was called."""
        return self._is_to_stop

    def save_final(self, state: Any, model: Any, told: dict[str, Any]) -> None:
        """Write the LoRA of the result, from which the draft heads are trained again; wait for it.

        told  the last progress, which another process tells again
        """
        self.close()
        self._tell()
        if self._path is None:
            return
        lora = {_ADAPTER + name: value for name, value in get_peft_model_state_dict(model).items()}
        best, figures = self._validation.taken()
        kept = {_BEST + name: value for name, value in best.items()}
        saved = SavedTraining(
            _copied({**lora, **kept}),
            {**self._told(state, figures), "is_final": True, "told": told},
        )
        self._writing = saved.step, self._writer.submit(saved.write, self._path)
        self.close()
        self._tell()

    def restore(self, model: Any) -> None:
        """Give the model, the validation and the losses the state that was found."""
        if self.found is None:
            return
        set_peft_model_state_dict(model, self.found.part(_ADAPTER))
        self._losses[:] = self.found.state["losses"]
        self._validation.put(self.found.state["validation"], self.found.part(_BEST))

    def restore_optimizer(self, optimizer: Any, schedule: Any) -> None:
        """Give both the state that was found."""
        assert self.found is not None
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in self.found.part(_OPTIMIZER).items():
            number, _, kind = name.partition(".")
            moments.setdefault(int(number), {})[kind] = tensor
        groups = self.found.state["optimizer"]
        optimizer.load_state_dict({"state": moments, "param_groups": groups})
        schedule.load_state_dict(self.found.state["schedule"])

    def restore_random(self) -> None:
        """Go on with the random numbers of the state that was found."""
        assert self.found is not None
        torch.set_rng_state(self.found.tensors[_RANDOM])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The order of an epoch's rows follows from the random numbers at its beginning.
        if self.found is not None and state.global_step == self.found.step:
            per_epoch = -(-len(kwargs["train_dataloader"]) // args.gradient_accumulation_steps)
            is_whole = state.global_step % per_epoch == 0
            torch.set_rng_state(self.found.tensors[_RANDOM if is_whole else _EPOCH_RANDOM])
        self._epoch_random = torch.get_rng_state()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, if it is time to: called after each step, when its loss is known to be a number."""
        if "loss" not in kwargs["logs"] or self._path is None:
            return
        self._tell()
        if self._is_over(state):
            return
        parts = kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"]
        self._take = lambda: None if self._is_over(state) else self._taken(state, *parts)
        if self._is_to_stop:
            self.has_stopped = control.should_training_stop = True
            self.save_now()
        elif self._writing is None and time.monotonic() - self._saved_at >= self._every_s:
            self._begin()

    def _is_over(self, state: Any) -> bool:
        """Whether the last step was made: the adapter is written now, and no state."""
        return self._validation.is_over or state.global_step >= state.max_steps

    def save_now(self) -> None:
        """Write the state after the last step, if there was one, and wait."""
        self.close()
        self._begin()
        self.close()

    def close(self) -> None:
        """Wait for the state that is being written."""
        if self._writing is not None:
            self._writing[1].exception()

    def _begin(self) -> None:
        saved = None if self._take is None else self._take()
        self._saved_at = time.monotonic()
        # One with NaN does not take the place of the last good one.
        if saved is not None and self._path is not None and saved.is_finite:
            self._writing = saved.step, self._writer.submit(saved.write, self._path)

    def _tell(self) -> None:
        """Say how the last writing ended, if it has."""
        if self._writing is None or not self._writing[1].done():
            return
        (step, written), self._writing = self._writing, None
        error = written.exception()
        if error is None:
            self._is_told = False
            self._emit("saved", step=step)
        elif not self._is_told:
            self._is_told = True
            self._emit("warning", message=f"the run's state could not be saved: {reason(error)}")

    def _taken(self, state: Any, model: Any, optimizer: Any, schedule: Any) -> SavedTraining:
        """Return copies: the training goes on while they are written."""
        best, figures = self._validation.taken()
        moments = optimizer.state_dict()
        tensors = {
            **{_ADAPTER + name: value for name, value in get_peft_model_state_dict(model).items()},
            **{_BEST + name: value for name, value in best.items()},
            **{
                f"{_OPTIMIZER}{number}.{kind}": value
                for number, values in moments["state"].items()
                for kind, value in values.items()
            },
            _RANDOM: torch.get_rng_state(),
            _EPOCH_RANDOM: self._epoch_random,
        }
        rest = {"optimizer": moments["param_groups"], "schedule": schedule.state_dict()}
        return SavedTraining(_copied(tensors), self._told(state, figures) | rest)

    def _told(self, state: Any, figures: dict[str, Any]) -> dict[str, Any]:
        """Return what each state says in JSON."""
        told = {name: value for name, value in vars(state).items() if name in _TRAINER_STATE}
        return {
            "job": self._job,
            "trainer": told,
            "losses": list(self._losses),
            "validation": figures,
        }


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


#: Of the Trainer's state: the rest follows from its arguments.
_TRAINER_STATE = (
    *("global_step", "epoch", "max_steps", "num_train_epochs", "train_batch_size"),
    *("logging_steps", "eval_steps", "save_steps"),
)


def reason(error: BaseException) -> str:
    """Return an error's reason, without the names of files."""
    return str(getattr(error, "strerror", None) or error)[:200]
