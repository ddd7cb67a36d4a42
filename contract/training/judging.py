"""Files through which a batch of trainings scores a new version.

    JUDGE_DIR/cases.jsonl                 what they are of (`Given`), then a line for each case
    JUDGE_DIR/adapter_config.json         of the version that is live,
    JUDGE_DIR/adapter_model.safetensors   and its tensors
    OUTPUT_DIR/scores.json                beside the new adapter's two files: `BatchScores`

Each side reads the other's file without trusting it: its length is bounded before it is read, and
every value is checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.strict_json import read_object

CASES_FILE, SCORES_FILE = "cases.jsonl", "scores.json"
MAX_CASES = 2000
MAX_CASES_BYTES = 32 << 20
MAX_SCORES_BYTES = 1 << 20
MAX_REASON_CHARS = 300
#: Longest time that the passes of one run's cases take, and longest wait for other runs' cases
#: before them. What takes longer is asked of serving workers.
MOST_S, MOST_WAIT_S = 120.0, 600.0
#: Largest number of tokens in one expected answer.
MAX_TOKENS = 1 << 20
#: The least log-probability that a token is given, as serving's: JSON has no -inf.
LEAST_LOGPROB = -9999.0
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_REVISION = re.compile(r"[\x21-\x7e]{1,64}", re.ASCII)

#: The log-probability of an expected answer and its number of tokens; (None, 0) without tokens.
Score = tuple[float | None, int]


class BadJudgingFile(ValueError):
    """A file that does not have this format; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The versions that the files in JUDGE_DIR belong to; the scores repeat them.

    suite_version  the id of the suite's version
    live_digest    of the version that is live, `contract.messages.protocol.adapter_digest`
    base_revision  of the base model
    """

    suite_version: str
    live_digest: str
    base_revision: str

    def __post_init__(self) -> None:
        _check(self.suite_version, "suite_version", _UUID)
        _check(self.live_digest, "live_digest", _SHA256)
        _check(self.base_revision, "base_revision", _REVISION)


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """A case's messages as the chat template gets them, and the answer that follows them."""

    messages: list[dict[str, Any]]
    expected: str

    def as_line(self) -> bytes:
        text = json.dumps({"expected": self.expected, "messages": self.messages}, sort_keys=True)
        return text.encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """sha256  `cases_sha256` of the lines"""

    given: Given
    answers: list[ExpectedAnswer]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScores:
    """Scores of each case's expected answer under the new adapter and under the live one.

    digest        of the new adapter
    cases_sha256  of what was scored
    candidate     by case, in the file's order; `live` as many
    """

    given: Given
    digest: str
    cases_sha256: str
    candidate: tuple[Score, ...]
    live: tuple[Score, ...]

    def __post_init__(self) -> None:
        _check(self.digest, "digest", _SHA256)
        _check(self.cases_sha256, "cases_sha256", _SHA256)
        if not 1 <= len(self.candidate) == len(self.live) <= MAX_CASES:
            raise BadJudgingFile("it must have one score for each case and adapter")


def cases_sha256(lines: Iterable[bytes]) -> str:
    """Return the digest of cases, each as `ExpectedAnswer.as_line` writes it."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def write_cases(folder: Path, given: Given, answers: Iterable[ExpectedAnswer]) -> None:
    """Write the cases where `read_cases` finds them."""
    with (folder / CASES_FILE).open("wb") as file:
        file.write(json.dumps(dataclasses.asdict(given)).encode() + b"\n")
        file.writelines(answer.as_line() for answer in answers)


def read_cases(folder: Path) -> Cases:
    """Return the cases to score. Raises BadJudgingFile, OSError."""
    first, *lines = _read(folder / CASES_FILE, MAX_CASES_BYTES).splitlines(keepends=True)
    if not 1 <= len(lines) <= MAX_CASES:
        raise BadJudgingFile(f"it has {len(lines)} cases instead of 1 to {MAX_CASES}")
    given = Given(**_fields(first, "suite_version", "live_digest", "base_revision"))
    answers = []
    for line in lines:
        fields = _fields(line, "expected", "messages")
        is_chat = isinstance(fields["messages"], list) and isinstance(fields["expected"], str)
        if not is_chat or not all(isinstance(message, dict) for message in fields["messages"]):
            raise BadJudgingFile("a case is not a chat")
        answers.append(ExpectedAnswer(fields["messages"], fields["expected"]))
    return Cases(given=given, answers=answers, sha256=cases_sha256(lines))


def write_scores(folder: Path, scores: BatchScores | str) -> None:
    """Write the scores beside an adapter, or why there are none."""
    if isinstance(scores, str):
        reason = "".join(char if char.isprintable() else " " for char in scores)
        told: dict[str, Any] = {"reason": reason[:MAX_REASON_CHARS]}
    else:
        told = dataclasses.asdict(scores)
    (folder / SCORES_FILE).write_text(json.dumps(told))


def read_scores(folder: Path) -> BatchScores | str | None:
    """Return the scores, or why there are none; None if nobody was asked to score the adapter.

    Raises BadJudgingFile, OSError.
    """
    try:
        text = _read(folder / SCORES_FILE, MAX_SCORES_BYTES)
    except FileNotFoundError:
        return None
    fields = _object(text)
    if fields.keys() == {"reason"}:
        reason = fields["reason"]
        if not isinstance(reason, str) or not reason.isprintable():
            raise BadJudgingFile("its reason is not a line of text")
        return reason[:MAX_REASON_CHARS]
    fields = _fields(text, "given", "digest", "cases_sha256", "candidate", "live")
    if not isinstance(fields["given"], dict):
        raise BadJudgingFile("`given` is not an object")
    given = json.dumps(fields["given"]).encode()
    return BatchScores(
        given=Given(**_fields(given, "suite_version", "live_digest", "base_revision")),
        digest=fields["digest"],
        cases_sha256=fields["cases_sha256"],
        candidate=_scores(fields["candidate"]),
        live=_scores(fields["live"]),
    )


def _read(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Links are not followed, and a pipe is not waited for."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise BadJudgingFile("it is not a file")
        text = opened.read(max_bytes + 1)
    if not 1 <= len(text) <= max_bytes:
        raise BadJudgingFile(f"its size must be 1 to {max_bytes} bytes")
    return text


def _object(text: bytes) -> dict[str, Any]:
    try:
        return read_object(text)
    except ValueError as error:
        raise BadJudgingFile(f"it {error}") from error


def _fields(text: bytes, *names: str) -> dict[str, Any]:
    fields = _object(text)
    if fields.keys() != set(names):
        raise BadJudgingFile(f"its fields are not {', '.join(names)}")
    return fields


def _check(value: Any, name: str, form: re.Pattern[str]) -> None:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise BadJudgingFile(f"`{name}` has the wrong type")


def _scores(given: Any) -> tuple[Score, ...]:
    if not isinstance(given, list) or len(given) > MAX_CASES:
        raise BadJudgingFile("it needs a list of scores")
    return tuple(_score(each) for each in given)


def _score(given: Sequence[Any]) -> Score:
    if not isinstance(given, list) or len(given) != 2:
        raise BadJudgingFile("a score is not a pair")
    logprob, num_tokens = given
    if logprob is None and type(num_tokens) is int and num_tokens == 0:
        return None, 0
    if type(num_tokens) is not int or not 1 <= num_tokens <= MAX_TOKENS:
        raise BadJudgingFile("a score needs 1 or more tokens")
    # Written so that NaN, which fails every comparison, is refused.
    if type(logprob) not in (int, float) or not num_tokens * LEAST_LOGPROB <= logprob <= 0:
        raise BadJudgingFile("a log-probability is out of range")
    return float(logprob), num_tokens
