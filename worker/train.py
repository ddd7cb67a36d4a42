"""Fine-tune a LoRA adapter from chat JSONL.

    python -m worker.train JOB.json

JOB.json:

    {"base_model_dir": "…",          a Hugging Face folder, with or without lorikeet.json
     "dataset": "chats.jsonl",
     "output_dir": "…",              made when training succeeds; must not exist
     "hyperparameters": {…},         `Hyperparameters`; what is left out takes its default
     "num_threads": 2,               optional; default: PyTorch's choice
     "base_model": "…"}              optional: its name; default: what the folder says

Standard output carries one JSON object per line and nothing else:

    {"event": "started", "rows", "truncated_rows", "tokens", "steps", "trainable_parameters"}
    {"event": "progress", "step", "steps", "loss", "learning_rate", "tokens_per_s", "eta_s"}
    {"event": "done", "output", "final_loss", "trained_tokens", "seconds"}
    {"event": "error", "message"}

Exit codes: 0 done · 1 a defect · 2 the job or its data are wrong · 143 stopped by SIGTERM or
SIGINT. The output folder appears complete or not at all. Training ends when the reader of the
events closes the pipe.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from contract.peft_config import FILE as CONFIG_FILE
from contract.training import JobError, TrainJob
from worker.base_model import MANIFEST


class Stopped(BaseException):
    """Raised in the main thread by SIGTERM and SIGINT."""


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


def write_adapter(save: Callable[[Path], Any], base: str, output_dir: Path) -> None:
    """Make the adapter's folder, whole or not at all: `save` writes PEFT's two files into it.

    Lists in the config are sorted: PEFT writes sets in an order that changes with every process,
    and the config is part of the adapter's digest.
    """
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{output_dir.name}.", dir=output_dir.parent))
    try:
        save(staging)
        config = json.loads((staging / CONFIG_FILE).read_text())
        config["base_model_name_or_path"] = base
        config["target_modules"] = sorted(config["target_modules"])
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (staging / CONFIG_FILE).write_text(text)
        (staging / "README.md").unlink(missing_ok=True)
        staging.chmod(0o755)
        staging.rename(output_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def base_name(job: TrainJob) -> str:
    """Return the base model's name: the job's, else that in lorikeet.json, else the folder's."""
    manifest = job.base_model_dir / MANIFEST
    if job.base_model or not manifest.is_file():
        return job.base_model or job.base_model_dir.name
    return str(json.loads(manifest.read_text())["name"])


def train(job: TrainJob, log: EventLog) -> None:
    """Run the job: report to `log`, write the adapter folder.

    Raises JobError or DatasetError when the job or its data are wrong.
    """
    # Imported here, so that a wrong job is refused before the seconds that importing torch takes.
    from worker.training.chat_data import load_examples
    from worker.training.loop import load_base, run_trainer

    started = time.monotonic()
    model, tokenizer = load_base(job)
    examples = load_examples(tokenizer, job.dataset, job.hyperparameters.max_length)
    outcome = run_trainer(model, tokenizer, examples, job.hyperparameters, log.emit)
    write_adapter(outcome.model.save_pretrained, base_name(job), job.output_dir)
    log.emit(
        "done",
        output=str(job.output_dir),
        final_loss=round(outcome.final_loss, 4),
        trained_tokens=outcome.trained_tokens,
        seconds=round(time.monotonic() - started, 1),
    )


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped


def main() -> int:
    log = EventLog(take_stdout())
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        if len(sys.argv) != 2:
            raise JobError("usage", "python -m worker.train JOB.json")
        train(TrainJob.read(Path(sys.argv[1])), log)
    except Stopped:
        log.emit("error", message="stopped before the end")
        return 143
    except BrokenPipeError:
        return 1  # the reader of the events is gone
    except ValueError as error:
        log.emit("error", message=str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        log.emit("error", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
