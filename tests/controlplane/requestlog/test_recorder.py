"""The gateway's recorder: what is collected, what is cut, and what happens while PostgreSQL is
away."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError

from contract.messages.protocol import GenerateJob, TokenEvent, Usage
from controlplane.queue.replies import Reply
from controlplane.requestlog import recorder as module
from controlplane.requestlog.recorder import Recorder
from controlplane.requestlog.services import Words

TENANT = uuid.uuid4()


def make_job(request_id: str = "req_1", **fields: Any) -> GenerateJob:
    return GenerateJob(
        **{
            "request_id": request_id,
            "tenant_id": str(TENANT),
            "api_key_id": "k",
            "gateway_id": "g",
            "model": "m",
            "base_model": "b",
            "text": "prompt",
            **fields,
        }
    )


def event(seq: int, text: str = "", *, lease: int = 1, **fields: Any) -> TokenEvent:
    return TokenEvent(request_id="req_1", lease=lease, seq=seq, text=text, **fields)


class Store:
    """Stands where the database is."""

    def __init__(self) -> None:
        self.kept: list[Words] = []
        self.choices = {TENANT: "all"}
        self.failures: list[Exception] = []

    def keep(self, found: Sequence[Words]) -> int:
        if self.failures:
            raise self.failures.pop(0)
        if any(words.request_id == "bad" for words in found):
            raise IntegrityError("its tenant is gone")
        self.kept += found
        return len(found)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(module, "contents_keep", made.keep)
    monkeypatch.setattr(module, "content_choices", lambda: made.choices)
    monkeypatch.setattr(module, "rules_of_all", lambda: {})
    monkeypatch.setattr(module, "close_old_connections", lambda: None)
    monkeypatch.setattr(module, "WRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    return made


@contextlib.contextmanager
def running(recorder: Recorder) -> Iterator[None]:
    task = asyncio.get_running_loop().create_task(recorder.run())
    try:
        yield
    finally:
        task.cancel()


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_replys_words_are_stored_after_its_end(store: Store) -> None:
    recorder = Recorder()
    reply = Reply(make_job(n=2), recorder.open(make_job(n=2)))
    reply.push(event(0, "a"))
    reply.push(event(1, "x", index=1))
    with running(recorder):
        await asyncio.sleep(0.05)
        assert store.kept == []
        reply.push(event(2, "b", finish_reason="stop", usage=Usage()))
        await until(lambda: store.kept)
    [words] = store.kept
    assert (words.prompt, words.outputs) == ({"text": "prompt"}, ["ab", "x"])
    assert (words.finish_reason, words.tenant_id, words.is_truncated) == ("stop", TENANT, False)


async def test_a_second_attempt_begins_afresh(store: Store) -> None:
    recorder = Recorder()
    reply = Reply(make_job(), recorder.open(make_job()))
    reply.push(event(0, "lost"))
    reply.push(event(0, "kept", lease=2, finish_reason="length"))
    await recorder.close()
    assert [words.outputs for words in store.kept] == [["kept"]]


async def test_an_answer_nobody_waited_for_is_stored_as_far_as_it_came(store: Store) -> None:
    recorder = Recorder()
    reply = Reply(make_job(), recorder.open(make_job()))
    reply.push(event(0, "half"))
    reply.abandon()
    reply.abandon()
    await recorder.close()
    assert [(words.outputs, words.finish_reason) for words in store.kept] == [
        (["half"], "cancelled")
    ]


async def test_a_choice_holds_at_once(store: Store) -> None:
    """Requests that run when it is made, too; the gateway need not have read it before."""
    store.choices = {}
    recorder = Recorder()
    with running(recorder):
        await until(lambda: recorder._choices is not None)
        reply = Reply(make_job(), recorder.open(make_job()))
        store.choices = {TENANT: "all"}
        reply.push(event(0, "a", finish_reason="stop", usage=Usage()))
        await until(lambda: store.kept)
    assert recorder._choices == {}, "it was read meanwhile: the test shows nothing"


async def test_of_who_wants_nothing_nothing_waits_while_the_database_is_away(store: Store) -> None:
    stranger = str(uuid.uuid4())
    store.failures = [OperationalError("away")] * 1000
    recorder = Recorder()
    with running(recorder):
        await until(lambda: recorder._choices is not None)
        recorder.open(make_job("req_1")).end("stop")
        await until(lambda: recorder._is_away)
        recorder.open(make_job("req_2", tenant_id=stranger)).end("stop")
        recorder.open(make_job("req_3", store=False)).end("stop")
        recorder.open(make_job("req_4")).end("stop")
        store.failures.clear()
        await until(lambda: len(store.kept) == 2)
        recorder.open(make_job("req_5", tenant_id=stranger)).end("stop")
        await until(lambda: len(store.kept) == 3)  # the write decides, with the choice of then
    assert [words.request_id for words in store.kept] == ["req_1", "req_4", "req_5"]


async def test_what_nobody_wants_takes_no_room_from_what_is_wanted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_CHARS", 40)
    recorder = Recorder()
    with running(recorder):
        await until(lambda: recorder._choices is not None)
    for number in range(5):
        fields = {"tenant_id": str(uuid.uuid4()), "text": "0123456789"}
        recorder.open(make_job(f"req_{number}", **fields)).end("stop")
    for number in range(5, 8):
        recorder.open(make_job(f"req_{number}", text="abcdef")).end("stop")
    await recorder.close()
    assert [words.request_id for words in store.kept] == [f"req_{n}" for n in (0, 1, 5, 6, 7)]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"text": "x" * 20}, {"text": "x" * 10}),
        ({"text": None, "token_ids": tuple(range(20))}, {"token_ids": list(range(10))}),
        ({"text": None, "prompts": ("aaaaaaa", "bbbbbb", "cc")}, {"prompts": ["bbbbbb", "cc"]}),
        ({"text": None, "messages": ({"a": 1}, {"b": "long" * 9}, {})}, {"messages": [{}]}),
    ],
)
async def test_what_is_too_long_is_cut(
    store: Store, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], prompt: Any
) -> None:
    monkeypatch.setattr(module, "MAX_CHARS", 10)
    recorder = Recorder()
    transcript = recorder.open(make_job(**fields))
    transcript.add(event(0, "12345678"))
    transcript.add(event(1, "90ab"))
    transcript.end("stop")
    await recorder.close()
    [words] = store.kept
    assert words.prompt == prompt
    assert (words.outputs, words.is_truncated) == (["1234567890"], True)


async def test_words_wait_while_the_database_is_away(store: Store) -> None:
    recorder = Recorder()
    store.failures = [OperationalError("away"), OperationalError("still away")]
    with running(recorder):
        for name in ("req_1", "bad", "req_2"):
            recorder.open(make_job(name)).end("stop")
        await until(lambda: len(store.kept) == 2)
    assert [words.request_id for words in store.kept] == ["req_1", "req_2"]
    assert recorder._num_chars == 0


async def test_no_more_wait_than_there_is_room_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_CHARS", 25)
    recorder = Recorder()
    for number in range(5):
        recorder.open(make_job(f"req_{number}", text="0123456789")).end("stop")
    await recorder.close()
    assert [words.request_id for words in store.kept] == ["req_0", "req_1"]


async def test_refusals_that_could_not_be_counted_are_counted_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[dict[Any, int]] = []
    failures = [OperationalError("away")]

    def add(counts: Any) -> None:
        if failures:
            raise failures.pop()
        counted.append(dict(counts))

    monkeypatch.setattr(module, "refusals_add", add)
    recorder = Recorder()
    for _ in range(3):
        recorder.refuse(TENANT, "/v1/completions", 429, "rate_limit_exceeded")
    with running(recorder):
        await until(lambda: counted)
    assert [list(counts.values()) for counts in counted] == [[3]]


async def test_refusals_that_can_never_be_counted_hold_no_words_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[dict[Any, int]] = []

    def add(counts: Any) -> None:
        attempts.append(dict(counts))
        raise IntegrityError("whatever it is, it is for ever")

    monkeypatch.setattr(module, "refusals_add", add)
    recorder = Recorder()
    recorder.refuse(TENANT, "/v1/completions", 429, "rate_limit_exceeded")
    with running(recorder):
        await until(lambda: len(attempts) > 1)
        recorder.open(make_job()).end("stop")
        await until(lambda: store.kept)
    assert [list(counts.values()) for counts in attempts[:2]] == [[1], [1]]


async def test_words_that_cannot_be_stored_hold_no_counts_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(module, "refusals_add", lambda counts: counted.append(sum(counts.values())))
    monkeypatch.setattr(module, "REFUSALS_INTERVAL_S", 0.0)
    store.failures = [OperationalError("no room for words")] * 1000
    recorder = Recorder()
    recorder.open(make_job()).end("stop")
    with running(recorder):
        await until(lambda: len(store.failures) < 1000)
        recorder.refuse(TENANT, "/v1/completions", 429, "rate_limit_exceeded")
        await until(lambda: 1 in counted)
    assert store.kept == []
