"""A Redis that stalls takes what was sent to it later, and on two connections in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from contract.messages.protocol import DONE_JOB_TTL_S, control_key, job_key
from controlplane.queue.dispatcher import Dispatcher
from controlplane.usage.limits.admit import Limits, Policy
from demo.stack import EmbeddedStack
from tests.queue_rig import QueueRig

LIMITS = Limits((Policy(id="tenant", max_concurrent=1),))


@pytest.fixture
def rig(stack: EmbeddedStack) -> Iterator[QueueRig]:
    made = QueueRig(stack.env["REDIS_URL"])
    yield made
    made.close()


async def test_what_is_admitted_after_it_was_given_up_is_never_run(rig: QueueRig) -> None:
    """Its client was told that the queue does not answer; nobody would read what is billed."""
    dispatcher = Dispatcher(rig.url, rig.pool)
    late, other = rig.job(), rig.job()
    await asyncio.wait_for(dispatcher.cancel(late.request_id), 10)
    rig.admit(late, LIMITS)
    rig.admit(other, LIMITS)
    assert [taken.job.request_id for taken in rig.pull(count=4)] == [other.request_id]
    ttl_s = rig.client.ttl(job_key(rig.pool, late.request_id))
    assert 0 < ttl_s <= DONE_JOB_TTL_S
    await dispatcher.close()


async def test_what_is_over_stays_as_it_is(rig: QueueRig) -> None:
    dispatcher = Dispatcher(rig.url, rig.pool)
    rig.accept()
    (taken,) = rig.pull()
    assert rig.publish(taken)
    before = rig.state(taken.job.request_id)
    await asyncio.wait_for(dispatcher.cancel(taken.job.request_id), 10)
    assert rig.state(taken.job.request_id) == before
    assert rig.client.xlen(control_key(rig.pool, "w")) == 0
    await dispatcher.close()
