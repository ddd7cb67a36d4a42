"""Examples on disk are those that were added, and take little memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from worker.training.example_store import IGNORED, ExampleStore, TrainingInputs
from worker.training.row_tokens import RowTokens


def test_examples_come_back_in_any_order(tmp_path: Path) -> None:
    store = ExampleStore(tmp_path)
    assert len(store) == 0 and list(store) == []
    store.add(RowTokens([5, 6, 7, 8], [range(1, 2), range(3, 4)]))
    first = store[0]
    store.add(RowTokens([9], [range(0, 1)]))  # behind what was read already
    assert (first.input_ids, first.labels) == ([5, 6, 7, 8], [IGNORED, 6, IGNORED, 8])
    assert [store[1].labels, store[0].labels] == [[9], first.labels]
    assert (store.num_tokens, store.length(0), store.length(1)) == (5, 4, 1)
    assert TrainingInputs(store)[1] == {"input_ids": [9], "labels": [9], "attention_mask": [1]}
    with pytest.raises(IndexError):
        store[2]
    assert list(tmp_path.iterdir()) == []  # its file has no name: nothing is left behind


def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    process, store = psutil.Process(), ExampleStore(tmp_path)
    tokens = RowTokens(list(range(4000)), [range(2000, 4000)])
    before = process.memory_info().rss
    for _ in range(10_000):
        store.add(tokens)
    assert store.num_tokens == 40_000_000  # 160 MB; as lists they were 640
    assert sum(len(store[index].input_ids) for index in range(0, 10_000, 1000)) == 40_000
    assert process.memory_info().rss - before < 24 << 20
