"""Clients that leave a stream at any byte of it: each request ends once, is billed once for what
was generated until then, and nothing of it stays behind. At every byte in `make test-long`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest

from tests.conformance.conftest import say
from tests.fakes import FAKE_NAME
from tests.live import LiveStack, wait_for
from tests.probed_gateway import HELD

WORKER = "leaving-echo"
#: Long enough that who leaves early has left before the answer is there.
STEP_S = 0.3
SAID = "hi"
AT_ONCE = 128
#: Characters of an answer of which the last comes minutes after who asked has left.
LONG = 400
#: What resets a connection when it is closed, in place of saying goodbye.
RESET = struct.pack("ii", 1, 0)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A way to have `SAID` said, and what ends its stream; `every`: the bytes between two tries."""

    path: str
    asking: Callable[[str], dict[str, Any]]
    last: bytes
    every: int


def chat(said: str) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": FAKE_NAME, "messages": say(said), **options}


def response(said: str) -> dict[str, Any]:
    return {"model": FAKE_NAME, "input": said, "stream": True}


def generate(said: str) -> dict[str, Any]:
    return {"inputs": said, "parameters": {"adapter_id": FAKE_NAME, "max_new_tokens": LONG}}


STREAMS = {
    "chat": Stream("/v1/chat/completions", chat, b"data: [DONE]", 5),
    "responses": Stream("/v1/responses", response, b"response.completed", 11),
    "lorax": Stream("/generate_stream", generate, b'"generated_text":"hi"', 7),
}


@dataclasses.dataclass(frozen=True)
class Site:
    live: LiveStack
    url: str

    def held(self) -> dict[str, int]:
        """What the gateway holds now."""
        answer: dict[str, int] = httpx.get(self.url + HELD).json()
        return answer

    def request(self, stream: Stream, said: str) -> bytes:
        body = json.dumps(stream.asking(said)).encode()
        head = (
            f"POST {stream.path} HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\n"
            f"Authorization: Bearer {self.live.tenants['globex'].key}\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def billed(self, request_ids: list[str]) -> list[tuple[str, int, str]]:
        """Request, generated tokens and end of each record."""
        with psycopg.connect(self.live.database_url) as connection:
            return connection.execute(
                "select request_id, completion_tokens, finish_reason from usage_usagerecord"
                " where request_id = any(%s)",
                (request_ids,),
            ).fetchall()


@pytest.fixture(scope="module")
def site(live: LiveStack) -> Iterator[Site]:
    pool = live.with_pool("leaving")
    web, url = pool.start_web("leaving-web", application="tests.probed_gateway:application")
    worker = pool.start_worker(WORKER, step_s=STEP_S, max_running=2 * AT_ONCE)
    accountant = pool.start_accountant("leaving-accountant")
    yield Site(pool, url)
    for process in (web, worker, accountant):
        process.stop(60)


@dataclasses.dataclass(frozen=True)
class Left:
    """What a client saw of its stream: `at` is the byte of the body that it left at."""

    at: int
    request_id: str
    seen: bytes


async def leave(site: Site, stream: Stream, at: int, said: str = SAID) -> Left:
    """Read the answer's head and `at` bytes of its body, and go.

    Again, as clients do, where the gateway says that it is busy: 128 come at once.
    """
    for _ in range(60):
        left = await leave_once(site, stream, at, said)
        if left is not None:
            return left
        await asyncio.sleep(1)
    raise AssertionError("the gateway was busy for a minute")


async def leave_once(site: Site, stream: Stream, at: int, said: str) -> Left | None:
    parts = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(site.request(stream, said))
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith((b"HTTP/1.1 429", b"HTTP/1.1 503")):
            return None
        assert head.startswith(b"HTTP/1.1 200"), head
        seen = b""
        while len(seen) < at and (more := await reader.read(at - len(seen))):
            seen += more
        if at % 2:  # every other one says goodbye
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()  # what follows may keep the loop from closing it
    request_id = head.lower().partition(b"x-request-id: ")[2].partition(b"\r")[0].decode()
    return Left(at, request_id, seen)


async def leave_at(site: Site, stream: Stream, places: list[int]) -> list[Left]:
    """At all of these, `AT_ONCE` clients at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(at: int) -> Left:
        async with room:
            return await leave(site, stream, at)

    return await asyncio.gather(*(one(at) for at in places))


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
async def test_who_leaves_at_any_byte_pays_once_for_what_there_was(
    site: Site, stream: Stream
) -> None:
    await check_who_leaves(site, stream)


@pytest.mark.long
async def test_who_leaves_at_every_byte_pays_once_for_what_there_was(site: Site) -> None:
    await check_who_leaves(site, dataclasses.replace(STREAMS["chat"], every=1))


async def check_who_leaves(site: Site, stream: Stream) -> None:
    await leave(site, stream, 1 << 20)  # what a first request starts is there
    before = site.held()
    whole = await leave(site, stream, 1 << 20)
    assert stream.last in whole.seen
    # How an answer's chunks are cut, and so its length, differs a little.
    left = await leave_at(site, stream, [*range(0, len(whole.seen) + 20, stream.every)])
    early = await leave(site, stream, 0, "x" * LONG)

    ids = [each.request_id for each in (whole, early, *left)]
    assert len(set(ids)) == len(ids)
    wait_for(lambda: len(site.billed(ids)) >= len(ids), timeout_s=60, what="every record")
    rows = {row[0]: row[1:] for row in site.billed(ids)}
    assert len(site.billed(ids)) == len(rows) == len(ids)
    most, _ = rows[whole.request_id]
    assert rows[early.request_id][0] < LONG, rows[early.request_id]
    assert rows[early.request_id][1] == "cancelled", rows[early.request_id]
    for each in left:
        tokens, reason = rows[each.request_id]
        assert reason in ("stop", "cancelled"), each
        assert tokens == most if reason == "stop" else tokens <= most, each
        if stream.last in each.seen:
            assert reason == "stop", each
    assert any(rows[each.request_id][1] == "stop" for each in left)

    def nothing_is_left() -> bool:
        beat = site.live.heartbeat(WORKER)
        return (
            beat is not None
            and beat.running + beat.waiting == 0
            and site.held()["replies"] == 0
            and site.held()["tasks"] <= before["tasks"]
        )

    wait_for(nothing_is_left, timeout_s=30, what="an idle worker and an empty gateway")
