"""A job of preferences from its file to its adapter: rows as tokens, events, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.training.job import Hyperparameters
from engine.text.codec import TextCodec
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.worker.training.job_runs import (
    adapter_of,
    request_of,
    run_here,
    token_rows,
    train_here,
    write_chats,
    write_job,
    write_rows,
)
from worker.training.chat_data import DatasetError, load_examples

DPO: dict[str, Any] = {"method": "dpo", "beta": 0.5, "max_steps": 12, "learning_rate": 0.02}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def pair(number: int, better: str = "world", worse: str = "how are you?") -> dict[str, Any]:
    return {
        "input": {"messages": [{"role": "user", "content": f"hello {number}"}]},
        "preferred_output": [{"role": "assistant", "content": better}],
        "non_preferred_output": [{"role": "assistant", "content": worse}],
    }


def job(folder: Path, base: Path, rows: list[Any], **hyper: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return write_job(folder, base, write_rows(folder / "pairs.jsonl", rows), **hyper)


def test_both_answers_follow_the_prompt_that_serving_makes(tmp_path: Path, base: Path) -> None:
    request = request_of(job(tmp_path, base, [pair(1), pair(2, "a", "b")], **DPO), base)
    codec, texts = TextCodec(base), []
    for tokens, marks in token_rows(request.rows):
        learned = [token for token, mark in zip(tokens, marks, strict=True) if mark]
        texts.append((codec.decode_whole(tokens), codec.decode_whole(learned)))
    prompt = "<|im_start|>user\nhello 1<|im_end|>\n<|im_start|>assistant\n"
    assert texts[:2] == [
        (f"{prompt}{answer}<|im_end|>", f"{answer}<|im_end|>")
        for answer in ("world", "how are you?")
    ]
    assert [learned for _, learned in texts[2:]] == ["a<|im_end|>", "b<|im_end|>"]
    assert request.settings.beta == 0.5


def test_a_run_learns_what_is_preferred_and_says_so(tmp_path: Path, base: Path) -> None:
    rows = [pair(number) for number in range(12)]
    path = job(tmp_path, base, rows, **DPO, validation_share=0.3, eval_steps=4)
    started, *progress, done = run_here(path)
    assert started["event"] == "started", started
    assert started["rows"] + started["validation_rows"] == 12
    assert started["examples"] == started["rows"]
    assert done["event"] == "done" and done["final_loss"] < 0.2
    last = progress[-1]
    assert last["reward_chosen"] > 0 > last["reward_rejected"]
    margin = last["reward_chosen"] - last["reward_rejected"]
    assert last["reward_margin"] == pytest.approx(margin, abs=2e-4)
    assert last["reward_accuracy"] == last["validation_reward_accuracy"] == 1
    assert last["validation_loss"] < 0.2
    assert progress[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert adapter_of(path)


def test_a_run_of_preferences_and_one_of_chats_share_a_batch(tmp_path: Path, base: Path) -> None:
    def jobs(folder: Path) -> list[Path]:
        folder.mkdir()
        chats = folder / "sft"
        chats.mkdir()
        dataset = write_chats(chats / "chats.jsonl", "world")
        rows = [pair(number) for number in range(8)]
        return [job(folder / "dpo", base, rows, **DPO), write_job(chats, base, dataset)]

    code, together = train_here(tmp_path / "states", jobs(tmp_path / "together"))
    assert code == 0, together
    for path in jobs(tmp_path / "alone"):
        _, alone = train_here(tmp_path / "own", [path])
        name = path.parent.name
        losses = [[e["loss"] for e in found[name] if e["event"] == "progress"]
                  for found in (together, alone)]  # fmt: skip
        assert losses[0] == losses[1] and len(losses[0]) > 2


def test_rows_of_another_method_are_refused_by_line(tmp_path: Path, base: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
    for rows, hyper, told in (
        ([chat, chat], DPO, "line 1 has one answer: the method dpo takes pairs"),
        ([pair(1), pair(2)], {}, "line 1 has two answers: train it with the method dpo"),
    ):
        events = run_here(job(tmp_path, base, rows, **hyper))
        assert events[-1]["event"] == "error"
        assert (events[-1]["message"], events[-1]["field"]) == (told, "dataset")


def test_a_pair_of_which_an_answer_is_cut_off_is_left_out(tmp_path: Path, base: Path) -> None:
    long = pair(2)
    long["input"]["messages"][0]["content"] = "hello " * 80
    path = write_rows(tmp_path / "pairs.jsonl", [pair(1), long, pair(3, worse="how " * 60)])
    codec = TextCodec(base)
    hyper = {"method": "dpo", "max_length": 60}
    with pytest.raises(DatasetError, match="line 2 has"):
        load_examples(codec, path, Hyperparameters.from_dict(hyper))
    data = load_examples(codec, path, Hyperparameters.from_dict({**hyper, "truncate": True}))
    assert (data.num_rows, data.num_examples, data.num_dropped, data.num_cut) == (3, 2, 1, 2)
    assert len(data.examples) == 4
