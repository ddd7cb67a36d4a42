"""Limits and budgets in the admit script: what is let in, what is given back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from controlplane.errors import RateLimited
from controlplane.queue.admission import BudgetSpent, rate_headers, refusal_error
from controlplane.usage.limits.admit import (
    SEED,
    Admitted,
    BudgetPeriod,
    Limits,
    Policy,
    Refusal,
    budget_state_key,
)
from demo.stack import EmbeddedStack
from tests.queue_rig import QueueRig


@pytest.fixture
def rig(stack: EmbeddedStack) -> Iterator[QueueRig]:
    made = QueueRig(stack.env["REDIS_URL"])
    yield made
    made.close()


def budget(hard: int | None = None, soft: int | None = None) -> BudgetPeriod:
    return BudgetPeriod(
        id="b",
        api_key_id=None,
        period="day",
        starts_at=0.0,
        ends_at=time.time() + 3600,
        hard_limit=hard,
        soft_limit=soft,
    )


def seed(rig: QueueRig, period: BudgetPeriod, spent: int = 0) -> str:
    key = budget_state_key(rig.pool, "t", period)
    rig.client.eval(SEED, 1, key, spent, int(period.ends_at))
    return key


def refused(rig: QueueRig, limits: Limits, **options: int) -> Refusal:
    verdict = rig.admit(rig.job(), limits, **options)
    assert isinstance(verdict, Refusal), verdict
    return verdict


def test_requests_a_minute(rig: QueueRig) -> None:
    limits = Limits((Policy(id="p", requests_per_minute=3),))
    left = []
    for _ in range(3):
        verdict = rig.admit(rig.job(), limits)
        assert isinstance(verdict, Admitted)
        assert verdict.requests is not None
        left.append(verdict.requests.remaining)
    assert left == [2, 1, 0]
    refusal = refused(rig, limits)
    assert refusal.reason == "requests"
    assert 19 < refusal.retry_after_s <= 20
    error = refusal_error(refusal, limits)
    assert isinstance(error, RateLimited)
    assert error.headers()["Retry-After"] == "20"
    assert error.headers()["x-ratelimit-remaining-requests"] == "0"


def test_tokens_a_minute_are_settled_by_what_was_used(rig: QueueRig) -> None:
    limits = Limits((Policy(id="p", tokens_per_minute=1000),))
    rig.accept(limits=limits, prompt=100, output=900)
    assert refused(rig, limits, prompt=10, output=90).reason == "tokens"
    (taken,) = rig.pull()
    rig.publish(taken, prompt=20, output=80)
    verdict = rig.admit(rig.job(), limits, prompt=100, output=700)
    assert isinstance(verdict, Admitted)
    headers = rate_headers(verdict)
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert 100 <= int(headers["x-ratelimit-remaining-tokens"]) <= 110


def test_a_request_larger_than_the_bucket_takes_all_of_it(rig: QueueRig) -> None:
    limits = Limits((Policy(id="p", tokens_per_minute=100),))
    rig.accept(limits=limits, prompt=10, output=10_000)
    assert refused(rig, limits, prompt=1, output=0).reason == "tokens"


def test_concurrency_is_given_back_at_the_end(rig: QueueRig) -> None:
    limits = Limits((Policy(id="p", max_concurrent=2),))
    rig.accept(limits=limits)
    rig.accept(limits=limits)
    assert refused(rig, limits).reason == "concurrent"
    (taken,) = rig.pull()
    assert refused(rig, limits).reason == "concurrent"
    rig.publish(taken)
    rig.accept(limits=limits)


def test_what_waits_is_bounded_until_it_is_dispatched(rig: QueueRig) -> None:
    limits = Limits((Policy(id="p", max_waiting=2),))
    rig.accept(limits=limits)
    rig.accept(limits=limits)
    assert refused(rig, limits).reason == "waiting"
    rig.pull()
    rig.accept(limits=limits)


def test_a_refusal_changes_nothing(rig: QueueRig) -> None:
    limits = Limits(
        (Policy(id="p", requests_per_minute=100), Policy(id="q", scope="key", max_concurrent=1))
    )
    rig.accept(limits=limits)
    before = rig.client.hgetall(f"lim:{{{rig.pool}}}:t:p")
    for _ in range(5):
        refusal = refused(rig, limits)
        assert (refusal.reason, refusal.index) == ("concurrent", 2)
    assert rig.client.hgetall(f"lim:{{{rig.pool}}}:t:p") == before
    assert "this API key" in refusal_error(refusal, limits).message


def test_a_repeated_admit_counts_once(rig: QueueRig) -> None:
    limits = Limits((Policy(id="p", max_concurrent=1),))
    job = rig.job()
    for _ in range(3):
        assert isinstance(rig.admit(job, limits), Admitted)
    assert len(rig.pull(count=4)) == 1


def test_a_budget_refuses_and_says_not_to_retry(rig: QueueRig) -> None:
    period = budget(hard=100, soft=40)
    limits = Limits((), (period,))
    assert refused(rig, limits).reason == "unknown"
    seed(rig, period, spent=30)
    verdict = rig.admit(rig.job(), limits, prompt=10, output=50)
    assert isinstance(verdict, Admitted)
    assert verdict.soft_budget == period
    refusal = refused(rig, limits, prompt=10, output=10)
    error = refusal_error(refusal, limits)
    assert isinstance(error, BudgetSpent)
    assert (error.status, error.headers()) == (429, {"x-should-retry": "false"})
    assert error.body()["error"]["code"] == "insufficient_quota"


def test_a_budget_of_nothing_refuses_everything(rig: QueueRig) -> None:
    limits = Limits(budgets=(budget(hard=0),))
    seed(rig, limits.budgets[0])
    refusal = refused(rig, limits, prompt=1, output=0)
    assert (refusal.reason, refusal.limit) == ("budget", 0)
    assert isinstance(refusal_error(refusal, limits), BudgetSpent)


def test_a_soft_limit_alone_refuses_nothing_and_nothing_is_said_of_a_hard_one(
    rig: QueueRig,
) -> None:
    warned, quiet = Limits(budgets=(budget(soft=0),)), Limits(budgets=(budget(hard=10**12),))
    seed(rig, warned.budgets[0], spent=10**9)
    admitted = rig.admit(rig.job(), warned)
    assert isinstance(admitted, Admitted) and admitted.soft_budget == warned.budgets[0]
    admitted = rig.admit(rig.job(), quiet)
    assert isinstance(admitted, Admitted) and admitted.soft_budget is None


def test_nobodys_limits_are_anothers(rig: QueueRig) -> None:
    limits = Limits((Policy(id="p", requests_per_minute=1),))
    rig.accept("t", limits=limits)
    rig.accept("u", limits=limits)
    assert refused(rig, limits).reason == "requests"


def test_budgets_are_never_overspent_whatever_the_order(rig: QueueRig) -> None:
    """Gateways admit and workers finish at random, repeat themselves, and let some die half-way."""
    hard = 20_000
    period = budget(hard=hard)
    limits = Limits((), (period,))
    key = seed(rig, period)
    most = 0
    watching = threading.Event()

    def gateway(number: int) -> None:
        mine = QueueRig(rig.url)
        mine.pool, mine.queue = rig.pool, rig.queue
        mine._numbers = iter(range(number * 10_000, number * 10_000 + 5000))  # type: ignore[assignment]
        chance = random.Random(number)
        for _ in range(150):
            job = mine.job()
            for _ in range(chance.choice((1, 1, 2))):
                mine.admit(job, limits, prompt=chance.randrange(1, 50), output=100)
            for taken in mine.pull(f"w{number}", count=chance.randrange(3)):
                if chance.random() < 0.1:
                    continue  # its worker died: it stays reserved
                for _ in range(chance.choice((1, 2))):
                    mine.publish(taken, worker=f"w{number}", prompt=1, output=chance.randrange(101))
        mine.close()

    def watch() -> None:
        nonlocal most
        while not watching.is_set():
            spent, reserved = rig.client.hmget(key, "spent", "reserved")
            most = max(most, int(spent or 0) + int(reserved or 0))

    threads = [threading.Thread(target=gateway, args=(number,)) for number in range(4)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watching.set()
    watcher.join()
    spent, reserved = map(int, rig.client.hmget(key, "spent", "reserved"))
    used = sum(record.prompt_tokens + record.completion_tokens for record in rig.done())
    assert spent == used
    assert spent + reserved <= hard
    assert 0 < most <= hard
    assert len({record.request_id for record in rig.done()}) == len(rig.done()) > 50
