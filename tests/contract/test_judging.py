"""Files between a batch's child and who started it: what is written is read, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from contract.training import judging
from contract.training.judging import BadJudgingFile, BatchScores, ExpectedAnswer, Given

GIVEN = Given(
    suite_version="01234567-89ab-cdef-0123-456789abcdef",
    live_digest="a" * 64,
    base_revision="main-1",
)
SCORES = BatchScores(
    given=GIVEN,
    digest="b" * 64,
    cases_sha256="c" * 64,
    candidate=((-1.5, 3), (None, 0)),
    live=((-2.0, 3), (None, 0)),
)
ANSWERS = [ExpectedAnswer([{"role": "user", "content": f"é\u2028\r\n{n}"}], "x") for n in range(3)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    judging.write_cases(tmp_path, GIVEN, ANSWERS)
    cases = judging.read_cases(tmp_path)
    assert (cases.given, cases.answers) == (GIVEN, ANSWERS)
    assert cases.sha256 == judging.cases_sha256(answer.as_line() for answer in ANSWERS)
    assert judging.read_scores(tmp_path) is None
    judging.write_scores(tmp_path, SCORES)
    assert judging.read_scores(tmp_path) == SCORES
    judging.write_scores(tmp_path, "no\nroom" + "!" * 999)
    assert judging.read_scores(tmp_path) == ("no room" + "!" * 999)[: judging.MAX_REASON_CHARS]


def _with(**changes: Any) -> bytes:
    return json.dumps(dataclasses.asdict(SCORES) | changes).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"reason": 1}',
        b'{"reason": "a\\nb"}',
        b'{"reason": "a", "reason": "b"}',
        b'{"reason": "a", "more": 1}',
        _with(more=1),
        _with(digest="b" * 63),
        _with(cases_sha256=7),
        _with(given=[]),
        _with(given=dataclasses.asdict(GIVEN) | {"suite_version": "' or 1=1"}),
        _with(given=dataclasses.asdict(GIVEN) | {"base_revision": "a\0"}),
        _with(candidate=[], live=[]),
        _with(candidate=[[-1.0, 1]]),
        _with(candidate=[[-1.0, 1]] * 2001, live=[[-1.0, 1]] * 2001),
        _with(candidate=[[0.5, 1], [None, 0]]),
        _with(candidate=[[float("nan"), 1], [None, 0]]),
        _with(candidate=[[-1e5, 1], [None, 0]]),
        _with(candidate=[[True, 1], [None, 0]]),
        _with(candidate=[[-1.0, 0], [None, 0]]),
        _with(candidate=[[-1.0, 1.0], [None, 0]]),
        _with(candidate=[[None, 1], [None, 0]]),
        _with(candidate=[-1.0, [None, 0]]),
        _with() + b" " * judging.MAX_SCORES_BYTES,
    ],
)
def test_other_scores_are_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / judging.SCORES_FILE).write_bytes(text)
    with pytest.raises(BadJudgingFile):
        judging.read_scores(tmp_path)


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    """The child could name another tenant's file, or one that never ends."""
    judging.write_scores(tmp_path, SCORES)
    path = tmp_path / judging.SCORES_FILE
    other = path.rename(tmp_path / "other")
    path.symlink_to(other)
    with pytest.raises(OSError):
        judging.read_scores(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadJudgingFile):
        judging.read_scores(tmp_path)


@pytest.mark.parametrize(
    "line", [b"{}\n", b'{"expected": "x", "messages": [1]}\n', b'{"expected": 1, "messages": []}\n']
)
def test_other_cases_are_refused(tmp_path: Path, line: bytes) -> None:
    judging.write_cases(tmp_path, GIVEN, [])
    with pytest.raises(BadJudgingFile, match="has 0 cases"):
        judging.read_cases(tmp_path)
    with (tmp_path / judging.CASES_FILE).open("ab") as file:
        file.write(line)
    with pytest.raises(BadJudgingFile):
        judging.read_cases(tmp_path)
