"""Who is served next, and how long anybody can be kept waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from contract.queue import fair_queue
from controlplane.usage.limits.admit import Refusal
from demo.stack import EmbeddedStack
from tests.queue_rig import QueueRig


@pytest.fixture
def rig(stack: EmbeddedStack) -> Iterator[QueueRig]:
    made = QueueRig(stack.env["REDIS_URL"])
    yield made
    made.close()


def serve(rig: QueueRig, count: int) -> list[str]:
    """Dispatch and finish requests one by one. -> their tenants."""
    tenants = []
    for _ in range(count):
        (taken,) = rig.pull()
        rig.publish(taken)
        tenants.append(taken.job.tenant_id)
    return tenants


def test_a_flood_of_10000_delays_a_trickle_by_one_dispatch(rig: QueueRig) -> None:
    for _ in range(10_000):
        rig.accept("flood")
    waits = []
    for _ in range(100):
        serve(rig, 5)
        mine = rig.accept("trickle")
        for wait in range(10):
            (taken,) = rig.pull()
            rig.publish(taken)
            if taken.job.request_id == mine:
                waits.append(wait)
                break
    assert len(waits) == 100
    # A tie goes to the tenant whose name sorts first; then it is served once before.
    assert max(waits) <= 1


def test_two_that_always_wait_share_by_tokens_not_by_requests(rig: QueueRig) -> None:
    for _ in range(200):
        rig.accept("long", output=300)
        rig.accept("short", output=30)
    served: Counter[str] = Counter()
    for _ in range(150):
        (taken,) = rig.pull()
        tokens = 300 if taken.job.tenant_id == "long" else 30
        rig.publish(taken, output=tokens)
        served[taken.job.tenant_id] += 10 + fair_queue.OUTPUT_WEIGHT * tokens
    assert abs(served["long"] - served["short"]) <= 610 + 70


def test_idleness_earns_nothing(rig: QueueRig) -> None:
    for _ in range(100):
        rig.accept("busy")
    serve(rig, 50)
    for _ in range(20):
        rig.accept("late")
    served = Counter(serve(rig, 20))
    assert 9 <= served["late"] <= 11


def test_an_estimate_that_was_too_high_is_given_back(rig: QueueRig) -> None:
    rig.accept("modest", output=4000)
    rig.accept("other", output=100)
    (first,) = rig.pull()
    (second,) = rig.pull()
    for taken in (first, second):
        rig.publish(taken, output=100)
    rig.accept("modest")
    rig.accept("other")
    counters = dict(rig.client.zrange(f"{rig.queue}:i", 0, -1, withscores=True))
    assert counters[b"modest"] == counters[b"other"]


def test_adapters_in_memory_come_first_but_nobody_is_passed_over_for_ever(rig: QueueRig) -> None:
    rig.client.sadd(fair_queue.residents_key(rig.pool, "w"), "here")
    for _ in range(30):
        rig.accept("a-cold", digest="elsewhere", output=1)
        rig.accept("warm", digest="here", output=1)
    tenants = serve(rig, 30)
    assert tenants[0] == "warm"
    gaps = "".join("c" if tenant == "a-cold" else "w" for tenant in tenants).split("c")
    assert max(map(len, gaps)) <= fair_queue.MAX_SKIPS + 1
    assert Counter(tenants)["a-cold"] >= 30 // (fair_queue.MAX_SKIPS + 2)


@pytest.mark.parametrize("at_a_time", [1, 3, 4], ids=str)
def test_batches_wait_for_people_but_not_for_ever(rig: QueueRig, at_a_time: int) -> None:
    for _ in range(60):
        rig.accept("batch", batch=True)
        rig.accept("people")
    served: Counter[str] = Counter()
    while served.total() < 48:
        served.update(taken.job.tenant_id for taken in rig.pull(count=at_a_time))
    assert served.total() == 48
    assert served["batch"] == 48 // fair_queue.BATCH_SHARE
    assert Counter(serve(rig, 72))["people"] == 60 - served["people"]


def test_cancelled_and_overdue_requests_take_no_place(rig: QueueRig) -> None:
    cancelled, overdue, wanted = (rig.accept() for _ in range(3))
    rig.client.hset(f"job:{{{rig.pool}}}:{cancelled}", "cancel", 1)
    rig.client.hset(f"job:{{{rig.pool}}}:{overdue}", "deadline", 1)
    assert [taken.job.request_id for taken in rig.pull()] == [cancelled, overdue, wanted]
    assert rig.state(cancelled)[b"charged"] == b"0"


def test_one_idle_worker_is_woken(rig: QueueRig) -> None:
    rig.beat("w1")
    rig.beat("w2")
    assert rig.pull("w1") == rig.pull("w2") == []
    rig.accept()
    wakes = [rig.client.xlen(f"ctl:{{{rig.pool}}}:{name}") for name in ("w1", "w2")]
    assert sorted(wakes) == [0, 1]


def test_the_sums_come_back_to_nothing(rig: QueueRig) -> None:
    for number in range(50):
        rig.accept(f"t{number % 7}", output=number)
    assert rig.client.hget(f"{rig.queue}:sums", "n") == b"50"
    serve(rig, 50)
    sums = rig.client.hgetall(f"{rig.queue}:sums")
    assert (sums[b"n"], sums[b"*"]) == (b"0", b"0")
    assert not [name for name in sums if name.startswith(b"i:")]


def test_a_backlog_is_refused_early_and_says_whose_it_is(rig: QueueRig) -> None:
    for _ in range(10):
        rig.accept("own", output=100, speed=10, patience=101)
    verdict = rig.admit(rig.job("own"), output=100, speed=10, patience=101)
    assert isinstance(verdict, Refusal)
    assert (verdict.reason, round(verdict.retry_after_s)) == ("tenant_wait", 9)
    # The other's share is half of the pool: it may.
    rig.accept("other", output=100, speed=10, patience=101)
    crowded = rig.admit(rig.job("third"), output=1000, speed=10, patience=101)
    assert isinstance(crowded, Refusal)
    assert crowded.reason == "pool_wait"


def test_a_full_pool_refuses(rig: QueueRig) -> None:
    rig.accept(most=1)
    verdict = rig.admit(rig.job(), most=1)
    assert isinstance(verdict, Refusal)
    assert verdict.reason == "pool"
