"""Rows on disk are those that were added, and take little memory."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.worker.training.job_runs import token_rows
from worker.training.row_files import RowFiles
from worker.training.row_tokens import RowTokens


def test_rows_are_those_that_were_added(tmp_path: Path) -> None:
    files = RowFiles(tmp_path)
    assert (len(files), files.num_tokens) == (0, 0)
    files.add(RowTokens([5, 6, 7, 8], [range(1, 2), range(3, 4)]))
    files.add(RowTokens([9, 4], [range(0, 2)]))
    assert (len(files), files.num_tokens) == (2, 6)
    rows = files.rows()
    # Nothing predicts the first token of a row.
    assert token_rows(rows) == [
        ([5, 6, 7, 8], [False, True, False, True]),
        ([9, 4], [False, True]),
    ]
    assert (rows.lengths, rows.num_answers) == ([4, 2], [2, 1])
    assert list(tmp_path.iterdir()) == []  # its files have no name: nothing is left behind


def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    process, files = psutil.Process(), RowFiles(tmp_path)
    tokens = RowTokens(list(range(4000)), [range(2000, 4000)])
    before = process.memory_info().rss
    for _ in range(10_000):
        files.add(tokens)
    rows = files.rows()
    assert files.num_tokens == 40_000_000 == sum(rows.lengths)  # 200 MB
    assert sum(rows.num_answers) == 20_000_000
    # What is mapped of a file can be dropped at any time.
    assert process.memory_full_info().uss - before < 64 << 20
