"""Rows are checked in a sealed child: soon, in little memory, whatever they are."""

from __future__ import annotations

import itertools
import json
import os
import threading
import uuid
from collections.abc import Iterator

import psutil
import pytest
from django.conf import settings

from contract.row_formats.keys import MAX_MESSAGES
from contract.training import chat_rows, chat_rows_process
from controlplane.errors import InvalidRequest, RateLimited
from controlplane.files import services as files
from controlplane.files.models import Purpose
from controlplane.gateway.fine_tuning.dataset_files import dataset_from_file
from controlplane.infra import sealed_child, storage
from controlplane.infra.sealed_child import Bounds, Ended
from controlplane.training.datasets import contents, dataset_checks, row_check
from tests.controlplane.conftest import Party

TENANT = uuid.uuid4()
MIB = 1 << 20


def row(text: str) -> bytes:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
    return json.dumps({"messages": messages}).encode() + b"\n"


def in_child(pieces: Iterator[bytes]) -> Ended:
    """Check rows as `rows_check` does, and return what the child took."""
    read_end, write_end = os.pipe()

    def feed() -> None:
        with open(write_end, "wb") as pipe:
            for piece in pieces:
                pipe.write(piece)

    thread = threading.Thread(target=feed)
    with open(read_end, "rb") as file:
        thread.start()
        ended = sealed_child.run_sealed(
            chat_rows_process.__name__,
            {},
            [file],
            environment=settings.TRAINER_ENVIRONMENT,
            bounds=Bounds(memory_bytes=384 * MIB, cpu_s=60, wall_s=600, answer_bytes=1 << 16),
        )
    thread.join()
    return ended


def test_a_hundred_thousand_rows_take_at_most_20_s_and_64_mib() -> None:
    rows = (row(f"Which invoice has the number {number}? " + "word " * 40) for number in range(100))
    lines = b"".join(rows)
    ended = in_child(itertools.repeat(lines, 1000))
    assert ended.answer == {"num_rows": 100_000, "problems": []}
    assert ended.cpu_s <= 20
    assert ended.peak_bytes <= 64 * MIB


def test_the_child_says_what_this_process_would_say() -> None:
    wrong = (
        row("one") + b"no JSON\n\n" + b'{"messages": []}\n' + row("x" * chat_rows.MAX_LINE_BYTES)
    )
    found = row_check.rows_check(TENANT, [wrong[:7], wrong[7:]], len(wrong))
    assert found == chat_rows.lint(wrong)
    assert [problem.line for problem in found.problems] == [2, 4, 5]
    good = row("one") * 3
    assert row_check._read(row_check._in_child(iter([good]), len(good))) == chat_rows.lint(good)


def test_the_child_converts_as_this_process_does() -> None:
    line = json.dumps({"instruction": "Total of 3 x 12? é🦜", "output": "36"}).encode() + b"\n"
    few = row("ours") + line * 3
    many = few * (2 * MIB // len(few))
    made, formats = row_check.rows_convert(TENANT, few, max_bytes=8 * MIB)
    assert row_check.rows_convert(TENANT, many, max_bytes=8 * MIB) == (
        made * (2 * MIB // len(few)),
        formats,
    )
    assert (formats, made.count(b"\n"), chat_rows.lint(made).problems) == ("Alpaca", 4, [])
    assert made.startswith(row("ours"))
    # Rows of ours stay as they are, also wrong ones: the check says what is wrong.
    wrong = row("one") + b"no JSON\n"
    assert row_check.rows_convert(TENANT, wrong, max_bytes=MIB) == (wrong, "")
    for content, told in (
        (line + b'{"text": "plain"}\n', "line 2: text does not say which part is learned"),
        (line * 1000, "the converted file has more than 1000 bytes"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            row_check.rows_convert(TENANT, content, max_bytes=1000)


def test_an_array_of_32_mib_converts_in_bounded_memory() -> None:
    item = json.dumps({"instruction": "Total? 🦜" + "x" * 100, "output": "36"}, ensure_ascii=False)
    number = 31 * MIB // len(item.encode() + b",")
    content = f"[{','.join([item] * number)}]".encode()
    made, formats = row_check.rows_convert(TENANT, content, max_bytes=128 * MIB)
    assert (formats, made.count(b"\n")) == ("Alpaca", number)


def test_a_child_that_has_seen_enough_does_not_read_on() -> None:
    told: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(1000):
            told.append(number)
            yield b"wrong\n" * 50_000

    found = row_check.rows_check(TENANT, pieces(), 300 * MIB)
    assert len(found.problems) == chat_rows.MAX_PROBLEMS and len(told) < 100


def test_what_the_pieces_raise_is_raised() -> None:
    def pieces() -> Iterator[bytes]:
        yield row("one")
        raise storage.ObjectMissing("it")

    with pytest.raises(storage.ObjectMissing):
        row_check.rows_check(TENANT, pieces(), 2 * MIB)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * chat_rows.MAX_LINE_BYTES,
        b'{"messages": [' + b"{}," * 300_000 + b"{}]}",
        json.dumps({"messages": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}).encode(),
        b'{"a":' * 50_000,
        b"9" * 500_000,
        b"\x00\xff" * 1000,
    ],
)
def test_hostile_rows_are_named_and_bounded(line: bytes) -> None:
    content = row("one") + line + b"\n"
    found = row_check._read(row_check._in_child(iter([content]), len(content)))
    assert [problem.line for problem in found.problems] == [2]


def test_a_tenants_checks_have_places(monkeypatch: pytest.MonkeyPatch) -> None:
    with dataset_checks.place(TENANT), dataset_checks.place(TENANT), pytest.raises(RateLimited):
        row_check.rows_check(TENANT, [row("one")], 100)
    monkeypatch.setattr(row_check, "_CPU_S", 1)
    monkeypatch.setattr(row_check, "_CPU_S_PER_GB", 0)
    endless = itertools.repeat(row("word " * 1000) * 100)
    monkeypatch.setattr(row_check, "_WALL_PER_CPU", 120)
    with pytest.raises(InvalidRequest, match="check of the rows was stopped"):
        row_check.rows_check(TENANT, endless, 2 * MIB)


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
def test_two_gibibytes_become_a_dataset_in_bounded_memory(in_acme: Party) -> None:
    block = b"".join(row(f"{number} " + "word " * 800) for number in range(256))
    num_blocks = (settings.MAX_DATASET_BYTES - 1) // len(block)
    process = psutil.Process()
    before = peak = process.memory_info().rss
    file = files.file_begin(max_bytes=settings.MAX_DATASET_BYTES)
    writer = files.file_writer(file, max_bytes=settings.MAX_DATASET_BYTES)
    for _ in range(num_blocks):
        writer.write(block)
        peak = max(peak, process.memory_info().rss)
    form = files.FileForm(purpose=Purpose.FINE_TUNE, filename="rows.jsonl")
    file = files.file_finish(file, form, writer)
    peak = max(peak, process.memory_info().rss)
    dataset = dataset_from_file(name="large", file_id=file.public_id, appends=False)
    assert (dataset.num_rows, dataset.num_bytes) == (256 * num_blocks, len(block) * num_blocks)
    num_bytes = 0
    for piece in contents.pieces(dataset.sha256):
        num_bytes += len(piece)
        peak = max(peak, process.memory_info().rss)
    assert num_bytes == dataset.num_bytes
    assert peak - before < 128 * MIB
