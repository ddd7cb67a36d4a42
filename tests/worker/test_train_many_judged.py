"""Jobs whose adapters are scored in the batch, beside their live versions. All in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from contract.messages.protocol import adapter_digest
from contract.training import judging
from contract.training.judging import BatchScores, ExpectedAnswer, Given
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.trainers import train_in_float32
from tests.worker.training.job_runs import train_here, write_chats, write_job
from worker.child import Stopped
from worker.train import Training
from worker.training import judging as worker_judging

GIVEN = Given(
    suite_version="01234567-89ab-cdef-0123-456789abcdef",
    live_digest="a" * 64,
    base_revision="0" * 64,
)
FILES = ("adapter_config.json", "adapter_model.safetensors")
CHATS = (
    ([("user", "how are you?")], "fine"),
    (
        [("system", "Be kind."), ("user", "hello"), ("assistant", "world"), ("user", "?")],
        "{json}\n",
    ),
    ([("user", "☃ hello " * 9)], "hello world, how are you? " * 3),
)


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_float32(monkeypatch)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """An adapter that is not the initial one, with rsLoRA and other modules than the jobs'."""
    folder = tmp_path_factory.mktemp("live")
    rows = write_chats(folder / "data.jsonl", "moon")
    job = write_job(
        folder, tiny_base, rows, max_steps=4, rank=3, target_modules=["q_proj", "up_proj"]
    )
    assert train_here(folder / "checkpoints", [job])[0] == 0
    path = folder / "adapter" / FILES[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    return folder / "adapter"


def answers(marker: str = "") -> list[ExpectedAnswer]:
    return [
        ExpectedAnswer([{"role": r, "content": text + marker} for r, text in chat], expected)
        for chat, expected in CHATS
    ]


def write(folder: Path, base: Path, live: Path, marker: str = "", **hyper: Any) -> Path:
    """A job with cases and a live version."""
    folder.mkdir()
    rows = write_chats(folder / "data.jsonl", f"world {marker}")
    path = write_job(folder, base, rows, **({"max_steps": 6} | hyper))
    given = folder / "judge"
    given.mkdir()
    judging.write_cases(given, GIVEN, answers(marker))
    for name in FILES:
        shutil.copy(live / name, given)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"judge_dir": str(given)}))
    return path


def scores_of(job: Path) -> BatchScores:
    found = judging.read_scores(job.parent / "adapter")
    assert isinstance(found, BatchScores), found
    return found


def reference(base: Path, adapter: Path, marker: str) -> list[tuple[float, int]]:
    """What transformers and PEFT give each expected answer, to the token that ends the turn."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)).eval()
    found = []
    for answer in answers(marker):
        chat = [*answer.messages, {"role": "assistant", "content": answer.expected}]
        prompt = tokenizer.apply_chat_template(
            answer.messages, tokenize=False, add_generation_prompt=True
        )
        text = tokenizer.apply_chat_template(chat, tokenize=False).removesuffix("\n")
        whole = tokenizer.encode(text, add_special_tokens=False)
        first = len(tokenizer.encode(prompt, add_special_tokens=False))
        with torch.inference_mode():
            table = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        values = [float(table[at - 1, whole[at]]) for at in range(first, len(whole))]
        found.append((sum(values), len(values)))
    return found


def test_two_tenants_adapters_are_scored_beside_their_live_ones(
    tmp_path: Path, tiny_base: Path, live: Path
) -> None:
    markers = {"one": "ZEBRA", "two": "OKAPI"}
    jobs = {
        "one": write(tmp_path / "one", tiny_base, live, "ZEBRA"),
        "two": write(tmp_path / "two", tiny_base, live, "OKAPI", max_steps=2, rank=7),
    }
    code, events = train_here(tmp_path / "checkpoints", list(jobs.values()), budget=64)
    assert code == 0
    for name, job in jobs.items():
        assert events[name][-1]["event"] == "done"
        folder, scores = job.parent / "adapter", scores_of(job)
        config = json.loads((folder / FILES[0]).read_text())
        tensors = (folder / FILES[1]).read_bytes()
        assert scores.digest == adapter_digest(config, [tensors], GIVEN.base_revision)
        cases = judging.read_cases(job.parent / "judge")
        assert (scores.given, scores.cases_sha256) == (GIVEN, cases.sha256)
        for found, adapter in ((scores.candidate, folder), (scores.live, live)):
            wanted = reference(tiny_base, adapter, markers[name])
            assert [num for _, num in found] == [num for _, num in wanted]
            assert [own for own, _ in found] == pytest.approx([of for of, _ in wanted], abs=2e-3)
        assert scores.candidate != scores.live
        # The batch had both tenants' cases at once, and each folder has its own alone.
        others = {marker for other, marker in markers.items() if other != name}
        for path in job.parent.rglob("*"):
            if path.is_file():
                assert not any(other.encode() in path.read_bytes() for other in others), path


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        ("use_dora", "the batch does not compute the live version's use_dora"),
        ("tensors", "of the live version, the adapter cannot be read"),
        ("rank", "of the live version, the adapter does not fit"),
        ("cases", "it is not JSON"),
        ("long", "case 4 has"),
        ("time", "it would have taken more than 0 s"),
    ],
)
def test_what_cannot_be_scored_fails_no_run_and_says_why(
    tmp_path: Path,
    tiny_base: Path,
    live: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoilt: str,
    reason: str,
) -> None:
    job = write(tmp_path / "one", tiny_base, live, max_steps=1)
    given = job.parent / "judge"
    config = json.loads((given / FILES[0]).read_text())
    if spoilt == "tensors":
        (given / FILES[1]).write_bytes(b"x")
    elif spoilt == "cases":
        (given / judging.CASES_FILE).write_bytes(b"x\nx\n")
    elif spoilt == "long":
        long = ExpectedAnswer([{"role": "user", "content": "x" * 9000}], "y")
        judging.write_cases(given, GIVEN, [*answers(), long])
    elif spoilt == "time":
        monkeypatch.setattr(worker_judging, "MOST_S", 0.0)
    else:
        changed = {"r": 2} if spoilt == "rank" else {"use_dora": True}
        (given / FILES[0]).write_text(json.dumps(config | changed))
    code, events = train_here(tmp_path / "checkpoints", [job], budget=32)
    assert (code, events["one"][-1]["event"]) == (0, "done")
    found = judging.read_scores(job.parent / "adapter")
    assert isinstance(found, str) and found.startswith(reason)


def test_a_batch_that_is_stopped_meanwhile_keeps_the_adapter(
    tmp_path: Path, tiny_base: Path, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write(tmp_path / "one", tiny_base, live, max_steps=1)
    work: list[Training] = []
    made, passed = Training.__init__, worker_judging.CaseJudge._pass

    def make(self: Training, *args: Any) -> None:
        work.append(self)
        made(self, *args)

    def stop(self: Any, *args: Any) -> Any:
        work[0].stop(15, None)
        return passed(self, *args)

    monkeypatch.setattr(Training, "__init__", make)
    monkeypatch.setattr(worker_judging.CaseJudge, "_pass", stop)
    heard: list[dict[str, Any]] = []
    with pytest.raises(Stopped):
        train_here(tmp_path / "checkpoints", [job], budget=32, heard=heard)
    assert heard[-1]["event"] == "done"
    assert judging.read_scores(job.parent / "adapter") == "the batch was stopped, or the run"
