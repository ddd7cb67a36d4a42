"""Draft heads are trained beside an adapter, guess better than untrained ones, and are served."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from contract.base_shape import BaseShape
from contract.draft_heads import head_names, is_head_tensor
from contract.training import Hyperparameters, JobError, TrainJob
from contract.upload_check import check_adapter
from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.worker.training.test_checkpoints import Log
from tests.worker.training.test_train import write_job, write_rows
from worker.batch_training.jobs import prepare, NamedJob
from worker.text.codec import TextCodec
from worker.train import Stopped, StopSignals, train
from worker.train_many import _not_in_the_batch
from worker.training.chat_data import load_examples
from worker.training.draft_heads import targets_of
from worker.training.example_store import IGNORED

NUM_HEADS = 3
ANSWER = "how are you? {json: 12} hello world, how are you? {json: 21} world world"
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def chat(number: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"hello {number}"}
    return {"messages": [asked, {"role": "assistant", "content": ANSWER}]}


def job_in(folder: Path, base: Path, **hyper: Any) -> Path:
    folder.mkdir()
    rows = write_rows(folder / "data.jsonl", [chat(number) for number in range(12)])
    path = write_job(folder, base, rows, **{"max_steps": 40, "draft_heads": NUM_HEADS} | hyper)
    more = {"checkpoint": str(folder / "state.safetensors")}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return path


def run(path: Path, log: Log, signals: StopSignals | None = None) -> Log:
    train(TrainJob.read(path), log, signals)
    return log


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> tuple[Path, Log]:
    """A job with heads that has run, and its events."""
    path = job_in(tmp_path_factory.mktemp("trained") / "one", tiny_base)
    return path, run(path, Log())


def adapter_of(path: Path) -> Path:
    return path.parent / "adapter"


def test_trained_heads_guess_better_than_untrained_ones(trained: tuple[Path, Log]) -> None:
    told = trained[1].of("draft_heads")
    before, after = (told[-1][f"draft_head_accuracy{name}"] for name in ("_untrained", ""))
    print(before, after, [event["draft_head_loss"] for event in told])
    assert len(before) == len(after) == NUM_HEADS
    assert all(trained > 0.8 > 0.4 > untrained for untrained, trained in zip(before, after))
    assert told[-1]["draft_head_accuracy_on"] == "training"
    assert told[0]["draft_head_loss"] > 2 * told[-1]["draft_head_loss"]
    # The progress beside which they are shown.
    assert {**told[-1], **trained[1].of("progress")[-1], "event": 0} == {**told[-1], "event": 0}
