"""A body is bounded before anything reads it, and so is the time of a stranger's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from controlplane.gateway import body_limit
from controlplane.gateway.body_limit import BodyLimit, Event, Receive, Send


async def echo(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Answers with what it was sent."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def ask(
    pieces: list[bytes],
    declared: str | None = None,
    *,
    pause_s: float = 0.0,
    is_known: bool = False,
) -> tuple[int, bytes, int]:
    """The status, the body and how many pieces were taken, of which one comes each `pause_s`."""
    sent: list[Event] = []
    waiting = list(pieces)

    async def receive() -> Event:
        if pause_s:
            await asyncio.sleep(pause_s)
        piece = waiting.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    async def send(event: Event) -> None:
        sent.append(event)

    async def knows(scope: dict[str, Any]) -> bool:
        asked.append(scope)
        return is_known

    asked: list[Any] = []
    headers = [] if declared is None else [(b"content-length", declared.encode())]
    limit = BodyLimit(echo, max_bytes=10, is_known=knows)
    await limit({"type": "http", "headers": headers}, receive, send)
    assert len(asked) <= 1  # one look is enough for a body
    return sent[0]["status"], sent[1]["body"], len(pieces) - len(waiting)


async def test_body_at_the_limit_passes() -> None:
    assert await ask([b"01234", b"56789"], "10") == (200, b"0123456789", 2)


@pytest.mark.parametrize("declared", ["11", "-1", "ten", "9" * 5000], ids=len)
async def test_too_long_by_its_own_account_is_not_read(declared: str) -> None:
    status, body, num_taken = await ask([b"x"], declared)
    assert (status, num_taken) == (413, 0)
    assert json.loads(body)["error"]["code"] == "payload_too_large"


@pytest.mark.parametrize("declared", [None, "3"])
async def test_longer_than_it_said_is_cut_off(declared: str | None) -> None:
    status, _, num_taken = await ask([b"x" * 6] * 5, declared)
    assert (status, num_taken) == (413, 2)


@pytest.mark.parametrize("pause_s", [0.05, 0.3], ids=["drops", "one wait"])
async def test_a_strangers_slow_body_ends(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    monkeypatch.setattr(body_limit, "STRANGERS_S", 0.2)
    status, body, num_taken = await ask([b"x"] * 9, pause_s=pause_s)
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert num_taken < 9


@pytest.mark.parametrize("pause_s", [0.05, 0.3], ids=["drops", "one wait"])
async def test_the_slow_body_of_somebody_known_arrives(
    monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    monkeypatch.setattr(body_limit, "STRANGERS_S", 0.2)
    assert await ask([b"x"] * 9, pause_s=pause_s, is_known=True) == (200, b"x" * 9, 9)
