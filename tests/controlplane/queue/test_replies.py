"""What a client gets of events that come twice, late, under another lease, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contract.messages.protocol import GenerateJob, TokenEvent
from controlplane.errors import ApiError, InvalidRequest, Unavailable
from controlplane.queue.replies import MAX_UNREAD_EVENTS, Reply


def make_reply() -> Reply:
    job = GenerateJob(
        request_id="r", tenant_id="t", api_key_id="k", gateway_id="g", model="m", base_model="b"
    )
    return Reply(job)


def event(seq: int, text: str = "", *, lease: int = 1, **fields: Any) -> TokenEvent:
    return TokenEvent(request_id="r", lease=lease, seq=seq, text=text, **fields)


async def text_of(reply: Reply) -> str:
    (taken,) = await reply.take(1)
    return taken.text


async def test_what_piled_up_is_taken_as_one() -> None:
    reply = make_reply()
    reply.push(event(0, "a", logprobs=({"token": "a"},)))
    reply.push(event(1, "b", logprobs=({"token": "b"},), finish_reason="stop"))
    (taken,) = await reply.take(1)
    assert (taken.text, taken.finish_reason) == ("ab", "stop")
    assert taken.logprobs == ({"token": "a"}, {"token": "b"})


async def test_nothing_in_time_is_empty() -> None:
    assert await make_reply().take(0.01) == []


async def test_taking_waits_for_the_next() -> None:
    reply = make_reply()
    asyncio.get_running_loop().call_later(0.01, reply.push, event(0, "a"))
    assert await text_of(reply) == "a"


async def test_a_repeated_event_is_dropped() -> None:
    reply = make_reply()
    for seq, text in ((0, "a"), (0, "a"), (1, "b"), (0, "a"), (1, "b")):
        reply.push(event(seq, text))
    assert await text_of(reply) == "ab"


async def test_a_gap_ends_the_reply() -> None:
    reply = make_reply()
    reply.push(event(0, "a"))
    with pytest.raises(Unavailable):
        reply.push(event(2, "c"))


async def test_an_old_lease_is_not_listened_to() -> None:
    reply = make_reply()
    reply.push(event(0, "new", lease=2))
    reply.push(event(0, "old", lease=1))
    reply.push(event(1, "er", lease=2))
    assert await text_of(reply) == "newer"


async def test_another_attempt_begins_afresh_while_nothing_was_taken() -> None:
    reply = make_reply()
    reply.push(event(0, "lost"))
    reply.push(event(0, "again", lease=2))
    assert await text_of(reply) == "again"


async def test_another_attempt_cannot_continue_what_the_client_has_seen() -> None:
    reply = make_reply()
    reply.push(event(0, "seen"))
    await reply.take(1)
    with pytest.raises(Unavailable):
        reply.push(event(0, "again", lease=2))


async def test_the_end_that_a_later_lease_tells_of_is_heard() -> None:
    reply = make_reply()
    reply.push(event(0, "seen"))
    await reply.take(1)
    end = event(0, lease=2, finish_reason="error", error_code="worker_lost", error_message="lost")
    reply.push(end)
    with pytest.raises(ApiError, match="lost"):
        await reply.take(1)


async def test_an_error_is_raised_as_its_own_kind() -> None:
    reply = make_reply()
    reply.push(
        event(
            0,
            finish_reason="error",
            error_code="context_length_exceeded",
            error_message="too long",
            error_param="messages",
        )
    )
    with pytest.raises(InvalidRequest) as caught:
        await reply.take(1)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_a_failure_comes_after_what_was_unread() -> None:
    reply = make_reply()
    reply.push(event(0, "a"))
    reply.fail(Unavailable("gone"))
    assert await text_of(reply) == "a"
    with pytest.raises(Unavailable):
        await reply.take(1)


async def test_nothing_is_added_after_the_end() -> None:
    reply = make_reply()
    reply.push(event(0, "a", finish_reason="stop"))
    reply.push(event(1, "b"))
    assert await text_of(reply) == "a"


async def test_a_client_that_does_not_read_is_given_up() -> None:
    reply = make_reply()
    for seq in range(MAX_UNREAD_EVENTS):
        reply.push(event(seq, "x"))
    with pytest.raises(Unavailable):
        reply.push(event(MAX_UNREAD_EVENTS, "x"))
