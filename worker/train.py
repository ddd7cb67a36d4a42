"""Fine-tune a LoRA adapter from chat JSONL.

    python -m worker.train JOB.json

JOB.json:

    {"base_model_dir": "…",          a Hugging Face folder, with or without lorikeet.json
     "dataset": "chats.jsonl",
     "output_dir": "…",              made when training succeeds; must not exist
     "hyperparameters": {…},         `Hyperparameters`; what is left out takes its default
     "num_threads": 2,               optional; default: PyTorch's choice
     "base_model": "…",              optional: its name; default: what the folder says
     "validation_dataset": "…",      optional: rows to validate with, instead of a share of these
     "salt": "…",                    optional: which rows are in that share
     "warm_start": "….safetensors",  optional: tensors of an adapter to begin from
     "most_steps": 1, "most_tokens": 1,  optional: a longer training is an error
     "checkpoint": "….safetensors",  optional: the state is written there, and gone on from
     "checkpoint_s": 30.0,           seconds between two of them
     "kept_dir": "…"}                optional: where the adapters of `checkpoints` steps are kept,
                                    each in a folder of its step's number, with metrics.json

Standard output carries one JSON object per line and nothing else:

    {"event": "started", "rows", "examples", "truncated_rows", "dropped_rows", "validation_rows",
     "leaked_rows", "tokens", "steps", "trainable_parameters", "device"}
                                    examples: the rows, some in parts; see `row_tokens`
                                    "resumed_step": where it goes on from its checkpoint; its
                                    trained_tokens then count those before, too, and
                                    "validation_losses" has those before, [step, loss]
    {"event": "progress", "step", "steps", "loss", "learning_rate", "tokens_per_s", "eta_s",
     "trained_tokens", "memory_bytes",
     "validation_loss", "best_step", "best_loss"}   the last three, in `done` the last two, when
                                    there are rows to validate
    {"event": "draft_heads", "draft_head_step", "draft_head_steps", "draft_head_loss",
     "draft_head_accuracy": […], "draft_head_accuracy_untrained": […], "draft_head_accuracy_on"}
                                    with `draft_heads`, after the last step: how far they are; the
                                    last one has their share of right guesses, each head's, on
                                    "validation" or "training" rows. Each has the fields of the last
                                    progress, too
    {"event": "done", "output", "final_loss", "trained_tokens", "seconds", "best_step", "best_loss"}
    {"event": "saved", "step"}      its state after that step is on the disk
    {"event": "warning", "message"} what its owner should know; the training goes on
    {"event": "error", "message", "field"}     field: of the job, or "dataset"; else left out

Exit codes: 0 done · 1 a defect · 2 the job or its data are wrong · 4 the disk is full · 143 stopped
by SIGTERM or SIGINT. The output folder appears complete or not at all. Training ends when the
reader of the events closes the pipe. With a checkpoint, both write the state first, after the step
that is under way.
"""

from __future__ import annotations

import errno
import functools
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from contract.training import JobError, TrainJob
from worker.training.adapter_folder import base_name, write_adapter


class Stopped(BaseException):
    """Raised in the main thread by SIGTERM and SIGINT."""


class StopSignals:
    """Handles SIGTERM and SIGINT: raises Stopped, or calls `stop` once there is one."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.stop is None:
            raise Stopped
        self.stop()

    def let_stop(self, stop: Callable[[], None]) -> None:
        self.stop = stop


#: The exit code where no room is left on the disk.
DISK_FULL = 4


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or what it comes from, is that there is no room on the disk."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # safetensors has the error as text alone.
        if "No space left on device" in str(found):
            return True
        found = found.__cause__ or found.__context__
    return False


class EventLog:
    """Writes events to the standard output that the process was started with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: str, **fields: Any) -> None:
        self._stream.write(json.dumps({"event": event, **fields}, ensure_ascii=False) + "\n")
        self._stream.flush()


def take_stdout() -> TextIO:
    """Return a stream on standard output, and send all other output to standard error."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def train(job: TrainJob, log: EventLog, signals: StopSignals | None = None) -> None:
    """Run the job: report to `log`, write the adapter folder.

    Raises JobError or DatasetError when the job or its data are wrong, Stopped after a signal.
    """
    # Imported here, so that a wrong job is refused before the seconds that importing torch takes.
    # A fifth of them would be for a look at garbage, of which imports make none.
    gc.disable()
    import torch

    from worker.training.chat_data import load_data
    from worker.training.checkpoints import TrainingStopped
    from worker.training.draft_heads import save_adapter
    from worker.training.loop import load_base, run_trainer

    gc.enable()
    started = time.monotonic()
    signals = signals or StopSignals()
    try:
        model, codec = load_base(job)
        data = load_data(codec, job)
        outcome = run_trainer(
            model,
            data,
            job,
            log.emit,
            pad_id=codec.end_id or 0,
            on_stoppable=signals.let_stop,
        )
    except TrainingStopped as error:
        raise Stopped from error
    except torch.OutOfMemoryError as error:
        share = "" if job.gpu_share is None else f", of which the run may use {job.gpu_share:g}"
        problem = f"the GPU has not enough memory{share}; a smaller batch_size takes less"
        raise JobError("hyperparameters.batch_size", problem) from error
    save = functools.partial(save_adapter, outcome.model, outcome.heads)
    write_adapter(save, base_name(job), job.output_dir)
    best: dict[str, Any] = {}
    if outcome.best_loss is not None:
        best = {"best_step": outcome.best_step, "best_loss": round(outcome.best_loss, 4)}
    log.emit(
        "done",
        output=str(job.output_dir),
        final_loss=round(outcome.final_loss, 4),
        trained_tokens=outcome.trained_tokens,
        **best,
        seconds=round(time.monotonic() - started, 1),
    )


def main() -> int:
    log = EventLog(take_stdout())
    signals = StopSignals()
    signal.signal(signal.SIGTERM, signals)
    signal.signal(signal.SIGINT, signals)
    try:
        if len(sys.argv) != 2:
            raise JobError("usage", "python -m worker.train JOB.json")
        train(TrainJob.read(Path(sys.argv[1])), log, signals)
    except Stopped:
        log.emit("error", message="stopped before the end")
        return 143
    except BrokenPipeError:
        return 1  # the reader of the events is gone
    except ValueError as error:
        field = getattr(error, "field", None)
        log.emit("error", message=str(error), **({"field": field} if field else {}))
        return 2
    except Exception as error:
        if is_disk_full(error):
            log.emit("error", message="no room is left on the trainer's disk")
            return DISK_FULL
        traceback.print_exc()
        log.emit("error", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
