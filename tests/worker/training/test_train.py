"""`python -m worker.train` as its callers see it: a job file in, JSON lines and a folder out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_base import TINY_NAME, write_tiny_base
from worker.training.chat_data import (
    IGNORED,
    DatasetError,
    collate,
    encode_chat,
    load_examples,
    read_chats,
)

ROOT = Path(__file__).parents[3]
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "world "},
    {"role": "user", "content": "assistant\nhow?"},
    {"role": "assistant", "content": "fine\n"},
]


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_rows(
        tmp_path / "data.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": f"hello {i}" * (i % 5 + 1)},
                    {"role": "assistant", "content": "world"},
                ]
            }
            for i in range(12)
        ],
    )


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_job(folder: Path, base: Path, dataset: Path, **hyperparameters: Any) -> Path:
    defaults = {"rank": 4, "alpha": 8, "batch_size": 4, "learning_rate": 0.03, "warmup_steps": 0}
    job = {
        "base_model_dir": str(base),
        "dataset": str(dataset),
        "output_dir": str(folder / "adapter"),
        "hyperparameters": defaults | hyperparameters,
        "num_threads": 1,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def start(job: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "worker.train", str(job)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def run(job: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, events, standard error. Every line of standard output must be an event."""
    with start(job) as process:
        stdout, stderr = process.communicate(timeout=120)
    return process.returncode, [json.loads(line) for line in stdout.splitlines()], stderr


def test_trains_reports_and_writes_an_adapter_that_peft_loads(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    targets = ["q_proj", "down_proj"]
    job = write_job(tmp_path, tiny_base, dataset, max_steps=30, target_modules=targets)
    code, events, stderr = run(job)
    assert code == 0, stderr

    assert [event["event"] for event in events] == ["started", *["progress"] * 30, "done"]
    first, *progress, done = events
    assert (first["rows"], first["steps"], first["truncated_rows"]) == (12, 30, 0)
    assert [event["step"] for event in progress] == list(range(1, 31))
    assert all(event["steps"] == 30 and event["tokens_per_s"] > 0 for event in progress)
    assert progress[0]["learning_rate"] > progress[-1]["learning_rate"]
    assert progress[-1]["eta_s"] == 0
    assert done["final_loss"] < progress[0]["loss"] / 2
    assert done["trained_tokens"] > 0

    folder = Path(done["output"])
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == TINY_NAME
    assert (config["r"], config["target_modules"]) == (4, sorted(targets))
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2  # A and B of two modules in two layers
    trained, untrained = hf_losses(tiny_base, folder, dataset)
    assert trained < untrained / 2
    # The Trainer's loss over a shuffled batch and HF's own over all rows speak of the same thing.
    assert trained == pytest.approx(done["final_loss"], rel=0.2)


def hf_losses(base: Path, adapter: Path, dataset: Path) -> tuple[float, float]:
    """The mean loss over a dataset's answers, as HF computes it, with the adapter and without."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    examples = [encode_chat(tokenizer, messages, 512) for messages in read_chats(dataset)]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)

    def mean_loss() -> float:
        losses = [
            model(
                input_ids=torch.tensor([example.input_ids]), labels=torch.tensor([example.labels])
            ).loss.item()
            for example in examples
        ]
        return sum(losses) / len(losses)

    with torch.no_grad():
        trained = mean_loss()
        with model.disable_adapter():
            return trained, mean_loss()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, tiny_base: Path, dataset: Path) -> None:
    contents = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        code, _, stderr = run(write_job(folder, tiny_base, dataset, max_steps=3, seed=7))
        assert code == 0, stderr
        contents.append([path.read_bytes() for path in sorted((folder / "adapter").iterdir())])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("max_length", [8, 512])
def test_only_the_assistants_tokens_carry_a_loss(tiny_base: Path, max_length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    example = encode_chat(tokenizer, CHAT, max_length)
    assert len(example.input_ids) == len(example.labels) <= max_length
    assert example.is_truncated == (max_length == 8)
    for token, label in zip(example.input_ids, example.labels, strict=True):
        assert label in (token, IGNORED)
    if not example.is_truncated:
        labelled = [label for label in example.labels if label != IGNORED]
        assert tokenizer.decode(labelled) == "world <|im_end|>fine\n<|im_end|>"
        # Where the labels begin is where generation begins.
        prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True)["input_ids"]
        assert example.input_ids[: len(prompt)] == prompt
        assert example.labels[len(prompt) - 1 : len(prompt) + 1][0] == IGNORED
        assert example.labels[len(prompt)] == example.input_ids[len(prompt)]


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(ValueError, match=r"messages\[2\]"):
        encode_chat(tokenizer, CHAT, 512)


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path, tiny_base: Path) -> None:
    """As Mistral's templates refuse some roles."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    dataset = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT[1:3]}, {"messages": CHAT}])
    with pytest.raises(DatasetError, match=r"row 2: .*no system"):
        load_examples(tokenizer, dataset, 512)


def test_a_batch_is_padded_to_its_own_longest_row() -> None:
    batch = collate(
        [
            {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "attention_mask": [1, 1, 1]},
            {"input_ids": [8], "labels": [8], "attention_mask": [1]},
        ],
        pad_id=2,
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 2, 2]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["input_ids"].dtype == torch.int64


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
GOOD = {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, {"prompt": "a"}], "line 2: messages must be a list of messages"),
        ([GOOD, GOOD, {"messages": []}], "line 3: "),
        ([{"messages": [USER, {"role": "tool", "content": "b"}]}], r"line 1: messages\[1\].role"),
        ([{"messages": [USER, {"role": "assistant"}]}], r"line 1: messages\[1\].content"),
        ([{"messages": [ASSISTANT, USER]}], "line 1: messages must begin with a user"),
        ([{"messages": [USER]}], "line 1: messages must have a message of the assistant"),
        ([], "no rows"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_chats(write_rows(tmp_path / "bad.jsonl", rows))


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"[" * 100_000, b'"' + b"a" * (1 << 20)])
def test_bytes_that_are_no_row_are_named_by_their_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line)
    with pytest.raises(DatasetError, match=r"^line 3 is "):
        read_chats(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hyperparameters": {"target_modules": ["q_proj", "lm_head"]}}, "'lm_head'"),
        ({"hyperparameters": {"rank": 300}}, "rank"),
        ({"dataset": "/nowhere"}, "dataset"),
        ({"base_model_dir": "/nowhere"}, "base_model_dir"),
        ({"num_threads": 0}, "num_threads"),
        ({"gpu_share": 1.5}, "gpu_share"),
        ({"output_dir": "/"}, "output_dir"),
    ],
)
def test_a_wrong_job_ends_with_one_error_event_and_exit_code_2(
    tmp_path: Path, tiny_base: Path, dataset: Path, change: dict[str, Any], message: str
) -> None:
    job = write_job(tmp_path, tiny_base, dataset)
    job.write_text(json.dumps(json.loads(job.read_text()) | change))
    code, events, _ = run(job)
    assert code == 2
    assert [event["event"] for event in events] == ["error"]
    assert message in events[0]["message"]


def test_a_row_too_long_is_cut_and_one_without_an_answer_left_is_dropped(
    tmp_path: Path, tiny_base: Path
) -> None:
    long_answer = {"messages": [USER, {"role": "assistant", "content": "world " * 50}]}
    long_prompt = {"messages": [{"role": "user", "content": "hello " * 50}, ASSISTANT]}
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, long_answer, long_prompt])
    job = write_job(tmp_path, tiny_base, path, max_steps=1, max_length=32)
    code, events, stderr = run(job)
    assert code == 0, stderr
    assert (events[0]["rows"], events[0]["truncated_rows"]) == (2, 1)


def test_a_loss_that_is_no_number_writes_nothing(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    weights = tiny_base / "model.safetensors"
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_base.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    from safetensors.torch import save_file

    tensors = load_file(weights)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, broken / weights.name, metadata={"format": "pt"})
    code, events, _ = run(write_job(tmp_path, broken, dataset, max_steps=2))
    assert code == 2
    assert [event["event"] for event in events] == ["started", "error"]
    assert "infinite or NaN at step 1" in events[-1]["message"]
    assert not (tmp_path / "adapter").exists()


def test_sigterm_stops_it_and_leaves_nothing(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    with start(write_job(tmp_path, tiny_base, dataset, max_steps=1_000_000)) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert events[-1]["event"] == "progress"
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert time.monotonic() - began < 30
    last = json.loads(rest.splitlines()[-1])
    assert last == {"event": "error", "message": "stopped before the end"}
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl", "job.json"}


def test_it_ends_when_nobody_listens_any_more(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    with start(write_job(tmp_path, tiny_base, dataset, max_steps=1_000_000)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1
        process.stdout = None  # for the end of the block, which would read it
