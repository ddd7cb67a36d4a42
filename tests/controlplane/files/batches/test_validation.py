"""The first pass over a batch's file: its speed, its memory, and what it remembers."""

from __future__ import annotations

import itertools
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from contract.process import line_reader
from controlplane.adapters.models import BaseModel
from controlplane.files.batches import lines
from controlplane.files.batches.validation import MAX_FAULTS, Found, RefusedLine, validate
from controlplane.tenants import auth
from tests.controlplane.conftest import Party

ENDPOINT = "/v1/chat/completions"
#: The target: 10,000 lines in so many seconds.
MAX_S = 3.0


def raw(number: int, text: str = "Which of these is the total?", **body: Any) -> bytes:
    fields = {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": ENDPOINT,
        "body": {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "You read invoices and answer in one word."},
                {"role": "user", "content": text},
            ],
            "max_tokens": 20,
            **body,
        },
    }
    return json.dumps(fields).encode()


def run(acme: Party, raw_lines: Iterator[bytes]) -> tuple[Found, list[RefusedLine]]:
    kept: list[RefusedLine] = []
    principal = auth.authenticate(acme.header)
    found = validate(raw_lines, endpoint=ENDPOINT, principal=principal, keep=kept.extend)
    return found, kept


def test_ten_thousand_lines_take_three_seconds_at_most(acme: Party, base_model: BaseModel) -> None:
    content = b"\n".join(raw(i, "A line of some length. " * 20) for i in range(10_000))
    pieces = [content[i : i + 2**20] for i in range(0, len(content), 2**20)]
    started = time.process_time()  # of this process alone: others use the machine too
    found, kept = run(acme, line_reader.lines(pieces, max_bytes=lines.MAX_LINE_BYTES))
    seconds = time.process_time() - started
    assert (found.num_lines, found.faults, kept) == (10_000, [], [])
    assert found.models == {"tiny"}
    assert seconds < MAX_S


def test_memory_does_not_grow_with_the_file(acme: Party, base_model: BaseModel) -> None:
    """Lines of 16 KiB: what remains of each is its id."""

    def made() -> Iterator[bytes]:
        for i in range(3000):
            yield raw(i, "x" * 16_384)

    run(acme, iter([raw(0)]))
    before = psutil.Process(os.getpid()).memory_info().rss
    tracemalloc.start()
    found, _ = run(acme, made())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.num_lines == 3000
    assert peak < 4 * 1024**2, f"{peak / 1024**2:.1f} MiB for a file of 48 MiB"
    assert psutil.Process(os.getpid()).memory_info().rss - before < 48 * 1024**2


def test_refusals_come_some_at_a_time(acme: Party, base_model: BaseModel) -> None:
    sizes: list[int] = []
    found = validate(
        (raw(i, temperature=9) for i in range(1200)),
        endpoint=ENDPOINT,
        principal=auth.authenticate(acme.header),
        keep=lambda refusals: sizes.append(len(refusals)),
    )
    assert (found.num_lines, found.faults) == (1200, [])
    assert sizes == [500, 500, 200]


def test_the_pass_is_over_after_a_hundred_faults(acme: Party, base_model: BaseModel) -> None:
    found, _ = run(acme, (b"no JSON" for _ in range(100_000)))
    assert len(found.faults) == found.num_lines == MAX_FAULTS


def test_a_line_that_is_too_long_is_cut_and_told(acme: Party, base_model: BaseModel) -> None:
    def pieces() -> Iterator[bytes]:
        yield raw(0) + b"\n" + b'{"custom_id": "'
        for _ in range(12):
            yield b"x" * 2**20
        yield b'"}\n' + raw(2)

    found, _ = run(acme, line_reader.lines(pieces(), max_bytes=lines.MAX_LINE_BYTES))
    assert [(fault["line"], fault["code"]) for fault in found.faults] == [(2, "line_too_long")]
    assert found.num_lines == 3


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100])
def test_lines_are_the_same_however_the_bytes_come(cut: int) -> None:
    content = b"one\n\nthree\r\nfour\n\nsix"
    pieces = [content[i : i + cut] for i in range(0, len(content), cut)]
    assert list(line_reader.lines(pieces, max_bytes=100)) == content.split(b"\n")
    found = list(line_reader.lines(pieces, max_bytes=3))
    assert found == [line[:4] for line in content.split(b"\n")]


def test_empty_lines_are_bounded_too(acme: Party, base_model: BaseModel) -> None:
    few, _ = run(acme, itertools.chain([raw(1), b"", b"\r", raw(2), b"", b""]))
    assert (few.num_lines, few.faults) == (2, [])
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b""

    many, _ = run(acme, itertools.islice(endless(), 2_000_000))
    assert [fault["code"] for fault in many.faults] == ["too_many_lines"]
    assert taken <= 5 * lines.MAX_LINES


def test_odd_lines_are_read_as_json_says(acme: Party, base_model: BaseModel) -> None:
    """A byte order mark and Windows' line ends are let pass; what is no JSON is told."""
    found, kept = run(acme, iter([b"\xef\xbb\xbf" + raw(1), raw(2) + b"\r", b"\t" + raw(3)]))
    assert (found.num_lines, found.faults, kept) == (3, [], [])
    numbers = [b"NaN", b"-Infinity", b"1e400", b"1" * 4000, b"1" * 5000]
    odd = [raw(i, seed="@").replace(b'"@"', number) for i, number in enumerate(numbers)]
    found, kept = run(acme, iter(odd))
    assert [fault["code"] for fault in found.faults] == ["invalid_json_line"]
    assert [line for line, _ in kept] == [1, 2, 3, 4]
    assert all(json.loads(out)["response"]["status_code"] == 400 for _, out in kept)
    deep = [
        raw(i, metadata="@").replace(b'"@"', b"[" * d + b"]" * d)
        for i, d in ((1, 150), (2, 900), (3, 5000))
    ]
    found, kept = run(acme, iter(deep))
    assert found.num_lines == 3 and len(found.faults) + len(kept) == 3
