"""Packed, in several batches, or with less memory, a training learns what it learns plainly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.trainers import train_in_float32
from tests.worker.training.test_train import run_here, write_job, write_rows
from tests.worker.training.test_train_families import base as family_base
from worker.training.batches import collate, collate_packed
from worker.training.example_store import IGNORED

__all__ = ["family_base"]  # a fixture: Mistral with a sliding window, Qwen2, Qwen3
PAD = 0


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


@pytest.fixture(scope="module", autouse=True)
def _in_float32() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        train_in_float32(patch)
        yield


def examples(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Rows of tokens that are each their own; the later half of a row is learned."""
    made, first = [], 10
    for length in lengths:
        tokens = list(range(first, first + length))
        first += length
        labels = [IGNORED] * (length // 2) + tokens[length // 2 :]
        made.append({"input_ids": tokens, "labels": labels, "attention_mask": [1] * length})
    return made


def learned(batch: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """The tokens that have a loss, each with the token that it is predicted from."""
    labels, before = batch["labels"][:, 1:], batch["input_ids"][:, :-1]
    kept = labels != IGNORED
    return sorted(zip(before[kept].tolist(), labels[kept].tolist(), strict=True))


def test_a_packed_batch_has_the_loss_tokens_of_a_padded_one() -> None:
    rows = examples([5, 9, 3, 2, 12, 7, 1])
    rows[3]["labels"] = list(rows[3]["input_ids"])  # a row that is learned from its first token on
    padded, packed = collate(rows, PAD), collate_packed(rows, PAD, most=16)
    assert learned(packed) == learned(padded)
    assert padded["input_ids"].shape == (7, 12)
    assert packed["input_ids"].shape == (3, 16)
    for name in ("labels", "position_ids"):
        assert packed[name].shape == (3, 16)
    # Each row is whole in one sequence, and its positions begin at 0.
    for row in rows:
        (at,) = (packed["input_ids"] == row["input_ids"][0]).nonzero().tolist()
        span = slice(at[1], at[1] + len(row["input_ids"]))
        assert packed["input_ids"][at[0], span].tolist() == row["input_ids"]
        assert packed["position_ids"][at[0], span].tolist() == list(range(len(row["input_ids"])))


def test_a_row_longer_than_a_sequence_has_one_of_its_own() -> None:
    packed = collate_packed(examples([20, 3, 3]), PAD, most=8)
    assert packed["input_ids"].shape == (2, 20)


def hidden_by_token(model: Any, batch: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What the decoder makes of each token; every token is in one row alone."""
    names = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        found = model.model(
            **{name: batch[name] for name in names if name in batch}, use_cache=False
        ).last_hidden_state
    return dict(zip(batch["input_ids"].flatten().tolist(), found.flatten(0, 1), strict=True))


def check_rows_are_apart(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = examples([14, 9, 5, 11])
    plain = hidden_by_token(model, collate(rows, PAD))
    packed = hidden_by_token(model, collate_packed(rows, PAD, most=32))
    tokens = [token for row in rows for token in row["input_ids"]]
    for token in tokens:
        torch.testing.assert_close(packed[token], plain[token], atol=2e-5, rtol=1e-4)
    # Were they not apart, the rows behind the first would be others.
    joined = collate_packed(rows, PAD, most=64)
    joined["position_ids"] = torch.arange(joined["input_ids"].shape[1])[None]
    mixed = hidden_by_token(model, joined)
    assert max(float((mixed[token] - plain[token]).abs().max()) for token in tokens) > 1e-2


def test_no_packed_row_sees_another(tiny_base: Path) -> None:
    check_rows_are_apart(tiny_base)


def test_no_packed_row_sees_another_in_other_families(family_base: Path) -> None:
    check_rows_are_apart(family_base)


def trained(folder: Path, base: Path, **hyper: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ten steps over 24 rows of many lengths. -> the events, and the adapter's tensors."""
    folder.mkdir()
    chats = [
        [
            {"role": "user", "content": f"hello {number}" * (number % 5 + 1)},
            {"role": "assistant", "content": f"world {number}" * (number % 3 + 1)},
        ]
        for number in range(24)
    ]
    rows = write_rows(folder / "data.jsonl", [{"messages": chat} for chat in chats])
    events = run_here(write_job(folder, base, rows, max_steps=6, **hyper))
    return events, load_file(Path(events[-1]["output"]) / "adapter_model.safetensors")


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["event"] == "progress"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Any:
    return trained(tmp_path_factory.mktemp("plain") / "run", tiny_base, batch_size=8)


@pytest.mark.parametrize(
    "hyper",
    [
        {"batch_size": 8, "packing": True},
        {"batch_size": 4, "gradient_accumulation": 2},
        {"batch_size": 8, "gradient_checkpointing": True},
        {
            **{"batch_size": 2, "gradient_accumulation": 4},
            **{"packing": True, "gradient_checkpointing": True},
        },
    ],
    ids=["packed", "two batches", "checkpointed", "all"],
)
def test_it_learns_the_same(plain: Any, tmp_path: Path, tiny_base: Path, hyper: Any) -> None:
    """Of equal rows a step: the mean is over all learned tokens of the step, however divided."""
    expected_events, expected = plain
    events, tensors = trained(tmp_path / "run", tiny_base, **hyper)
    assert losses(events) == pytest.approx(losses(expected_events), abs=2e-3)
    assert events[0]["steps"] == expected_events[0]["steps"] == len(losses(events))
    assert events[-1]["trained_tokens"] == expected_events[-1]["trained_tokens"]
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], atol=5e-3, rtol=0)


def test_with_checkpointing_each_layer_is_computed_twice(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    attention = modeling_llama.LlamaAttention.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return attention(*args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", counted)
    trained(tmp_path / "plain", tiny_base, batch_size=8)
    once, calls = calls, 0
    trained(tmp_path / "less", tiny_base, batch_size=8, gradient_checkpointing=True)
    assert once > 0 and calls == 2 * once
