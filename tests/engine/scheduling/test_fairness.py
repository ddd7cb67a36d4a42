"""Who waits for whom, and how long at most: priorities, clustering, aging, under a simulated clock.

A step takes one second. Adversaries never end and always have successors.
"""

from __future__ import annotations

import math
import random

import pytest

from engine import Priority
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import PreemptionCause
from tests.engine.scheduling.test_scheduler import Residents, add, play, rows, scheduler

BATCH, INTERACTIVE = Priority.BATCH, Priority.INTERACTIVE


def residents(machine: Scheduler) -> Residents:
    assert isinstance(machine._adapters, Residents)
    return machine._adapters


def arrivals(sequences: list[Sequence]) -> list[int]:
    return [sequence.arrival for sequence in sequences]


# Priorities


def test_batch_work_gets_the_slots_and_tokens_that_are_left() -> None:
    machine = scheduler(max_running=3, max_step_tokens=20)
    add(machine, 0, 9, priority=BATCH)
    add(machine, 1, 9, priority=BATCH)
    add(machine, 2, 15)
    add(machine, 3, 3)
    assert rows(play(machine)) == [(2, 15), (3, 3), (0, 2)]
    assert rows(play(machine)) == [(2, 1), (3, 1), (0, 7)]


def test_a_running_batch_prompt_yields_its_tokens_to_an_interactive_one() -> None:
    machine = scheduler(max_step_tokens=20)
    add(machine, 0, 100, priority=BATCH)
    assert rows(play(machine)) == [(0, 20)]
    add(machine, 1, 18)
    assert rows(play(machine)) == [(1, 18), (0, 2)]
    assert not machine.preemptions


def test_an_interactive_request_takes_a_seat_from_the_youngest_batch_request() -> None:
    machine = scheduler(max_running=3)
    for i, priority in enumerate([BATCH, BATCH, INTERACTIVE]):
        add(machine, i, 3, priority=priority)
    play(machine)
    add(machine, 3, 3)
    play(machine)
    assert arrivals(machine.running) == [2, 3, 0]
    assert arrivals(machine.waiting) == [1]
    add(machine, 4, 3, priority=BATCH)
    add(machine, 5, 3)
    play(machine)
    assert arrivals(machine.running) == [2, 3, 5]
    add(machine, 6, 3)
    play(machine)  # interactive requests do not displace one another
    assert arrivals(machine.running) == [2, 3, 5]
    assert arrivals(machine.waiting) == [6, 0, 1, 4]
    assert machine.preemptions == {PreemptionCause.PRIORITY: 2}


def test_an_interactive_request_takes_pages_from_batch_work() -> None:
    machine = scheduler(6)
    add(machine, 0, 30, priority=BATCH)
    add(machine, 1, 30, priority=BATCH)
    play(machine)
    add(machine, 2, 60)
    assert rows(play(machine)) == [(0, 1), (2, 60)]
    assert arrivals(machine.waiting) == [1]


def test_an_interactive_request_takes_the_adapter_limit_from_batch_work() -> None:
    machine = scheduler(100, "a", "b", "c", max_adapters=2)
    add(machine, 0, 3, "a", priority=BATCH)
    add(machine, 1, 3, "b")
    play(machine)
    add(machine, 2, 3, "c")
    play(machine)
    assert arrivals(machine.running) == [1, 2]


def test_pages_for_an_interactive_requests_adapter_come_from_batch_work() -> None:
    machine = scheduler(4, "here")
    add(machine, 0, 40, "here", priority=BATCH)
    play(machine)
    residents(machine).without_room.add("cold")
    add(machine, 1, 3, "cold")
    play(machine)
    assert not machine.running and machine._pool.num_free >= 1


def test_who_gives_way_and_comes_back_in_one_step_runs_once() -> None:
    """The youngest yields a page, and gets others that an older one takes from the second."""
    machine = scheduler(8, max_wait_s=0.0, max_step_tokens=128)  # everybody is overdue
    add(machine, 0, 15)
    older = add(machine, 1, 40)
    older.is_waiting_for_grammar = True
    add(machine, 2, 70)
    add(machine, 3, 30)
    assert rows(play(machine)) == [(0, 15), (2, 70), (3, 30)]
    assert rows(play(machine)) == [(0, 1), (2, 1), (3, 1)]
    older.is_waiting_for_grammar = False
    assert rows(play(machine)) == [(0, 1), (1, 40), (3, 32)]


# Clustering


def test_a_known_adapter_overtakes_a_new_one_where_not_all_fit() -> None:
    machine = scheduler(100, "a", "b", max_running=2)
    add(machine, 0, 3, "a")
    first = add(machine, 1, 3, "a")
    play(machine)
    add(machine, 2, 3, "b")
    add(machine, 3, 3, "a")
    machine.remove(first)
    play(machine)
    assert arrivals(machine.running) == [0, 3]
    assert machine.waiting[0].num_skips == 1


def test_nobody_is_overtaken_more_often_than_max_skips() -> None:
    machine = scheduler(100, "a", "b", max_running=2)  # max_skips is 3
    add(machine, 0, 3, "a")
    add(machine, 1, 3, "a")
    play(machine)
    outsider = add(machine, 2, 3, "b")
    num_overtakers = 0
    for i in range(3, 9):
        add(machine, i, 3, "a")
        machine.remove(machine.running[-1])
        play(machine)
        if outsider.is_running:
            break
        num_overtakers += 1
    assert num_overtakers == outsider.num_skips == 3


# Aging


def crowd(machine: Scheduler, arrival: int, now: float, count: int, adapter: str | None) -> int:
    """Interactive requests that never end keep arriving; the next arrival number."""
    while len(machine.waiting) < count:
        add(machine, arrival, 3, adapter, now=now)
        arrival += 1
    return arrival


@pytest.mark.parametrize("priority", [BATCH, INTERACTIVE])
@pytest.mark.parametrize("adapter", [None, "b"])
def test_whoever_came_later_gives_way_after_max_wait(
    priority: Priority, adapter: str | None
) -> None:
    """The crowd is younger, always there, shares an adapter, and would run for ever."""
    limit = {BATCH: 40.0, INTERACTIVE: 15.0}[priority]
    machine = scheduler(
        200, "a", "b", max_running=3, max_adapters=1, max_wait_s=15.0, max_batch_wait_s=40.0
    )
    blocker = add(machine, 0, 3, "a", now=0.0)
    play(machine, 0.0)
    victim = add(machine, 1, 3, adapter, priority=priority, now=1.0)
    # max_adapters is one: with an adapter of its own the victim cannot run beside the blocker.
    arrival, started = 2, 0.0
    for now in range(1, 120):
        arrival = crowd(machine, arrival, float(now), 5, "a")
        if now == 3:
            machine.remove(blocker)
        play(machine, float(now))
        if victim.is_running and not started:
            started = now
        assert not started or victim.is_running, "whoever is overdue stays"
    assert 0 < started <= 1.0 + limit


def test_a_batch_request_that_is_preempted_again_and_again_becomes_overdue() -> None:
    """Its waits count together: 10 s in all, however often it ran in between."""
    machine = scheduler(200, max_running=1, max_wait_s=1e9, max_batch_wait_s=10.0)
    victim = add(machine, 0, 3, priority=BATCH)
    arrival, waited, num_stops = 1, 0, 0
    for now in range(100):
        if now % 4 == 1 and victim.rank[0]:
            add(machine, arrival, 3, now=float(now))
            arrival += 1
        was_running = victim.is_running
        play(machine, float(now))
        num_stops += was_running and not victim.is_running
        waited += not victim.is_running
        if now % 4 == 3 and not victim.is_running:
            machine.remove(machine.running[0])
    assert num_stops > 2 and victim.is_running
    assert waited <= 10


def test_overdue_requests_go_in_order_of_arrival_and_the_first_is_never_preempted() -> None:
    machine = scheduler(200, max_running=2, max_wait_s=5.0, max_batch_wait_s=5.0)
    for i in range(6):
        add(machine, i, 3, priority=BATCH if i % 2 else INTERACTIVE)
    for now in range(30):
        play(machine, float(now))
    # 0 and 2 began; 1 came before 2, so 2 gave way to it; nobody else has a claim on them.
    assert arrivals(machine.running) == [0, 1] or arrivals(machine.running) == [1, 0]
    assert arrivals(machine.waiting) == [2, 3, 4, 5]
    assert machine.preemptions == {PreemptionCause.OVERDUE: 1}
    for expected in (2, 3, 4, 5):
        machine.remove(machine.running[0])
        play(machine, 31.0)
        assert expected in arrivals(machine.running)


def test_where_nobody_becomes_overdue_nobody_is_set_back_for_having_come_later() -> None:
    """As a DashEngine runs: who was overtaken is next, and waits for a place to come free."""
    machine = scheduler(200, "a", "b", max_running=2, max_wait_s=math.inf)  # max_skips is 3
    add(machine, 0, 3, "a")
    add(machine, 1, 3, "a")
    play(machine)
    outsider = add(machine, 2, 3, "b")
    for arrival in range(3, 6):
        add(machine, arrival, 3, "a")
        machine.remove(machine.running[0])
        play(machine, 1000.0 * arrival)
    assert outsider.num_skips == 3
    for arrival in range(6, 60):
        add(machine, arrival, 3, "a")
        play(machine, 1000.0 * arrival)
    assert not outsider.is_running and not machine.preemptions
    machine.remove(machine.running[0])
    play(machine, 1e6)
    assert outsider.is_running and not machine.preemptions


def test_decodes_that_fill_the_budget_keep_nobody_out() -> None:
    machine = scheduler(200, max_running=4, max_step_tokens=4, max_wait_s=5.0)
    for i in range(4):
        add(machine, 10 + i, 1)
    play(machine)
    add(machine, 0, 3)
    for now in range(7):
        play(machine, float(now))
    assert arrivals(machine.running) == [0, 10, 11, 12]


def test_an_overdue_request_goes_before_the_prompts_of_later_ones() -> None:
    machine = scheduler(200, max_step_tokens=8, max_wait_s=5.0, max_batch_wait_s=5.0)
    add(machine, 0, 300)
    overdue = add(machine, 1, 10, priority=BATCH)
    for now in range(5):
        play(machine, float(now))
    add(machine, 2, 300, now=5.0)
    machine.remove(machine.running[0])
    play(machine, 5.0)
    assert overdue.num_computed == 8


def test_an_overdue_requests_adapter_gets_pages_from_those_that_came_later() -> None:
    machine = scheduler(8, "here", max_wait_s=10.0)
    cold = residents(machine).without_room
    cold.add("cold")
    waiting = add(machine, 0, 3, "cold")
    arrival = 1
    for now in range(12):
        arrival = crowd(machine, arrival, float(now), 4, "here")
        play(machine, float(now))
        if residents(machine).pool.num_free and now > 10:
            break
    assert not waiting.is_running and residents(machine).pool.num_free >= 1
    # What AdapterStore.poll does next:
    residents(machine).poll(["cold"])
    assert not cold
    for now in range(12, 16):
        arrival = crowd(machine, arrival, float(now), 4, "here")
        play(machine, float(now))
        assert residents(machine).is_resident("cold"), "evicted before its turn"
    assert waiting.is_running


@pytest.mark.parametrize("seed", range(60))
def test_bounds_hold_under_random_load(seed: int) -> None:
    """Everybody ends; nobody waits longer than its bound for anybody who came later."""
    choose = random.Random(seed)
    machine = scheduler(
        choose.choice([9, 14, 40]),
        *"abcd",
        max_running=choose.choice([1, 2, 4]),
        max_adapters=choose.choice([None, 1, 2]),
        max_step_tokens=choose.choice([8, 64]),
        max_wait_s=float(choose.choice([3, 20])),
        max_batch_wait_s=float(choose.choice([10, 50])),
    )
    left: dict[Sequence, int] = {}
    # Steps that had somebody who came later, while it waited.
    yielded: dict[Sequence, int] = {}
    arrival = 0
    for now in range(2500):
        if now < 150 and choose.random() < 0.6:
            sequence = add(
                machine,
                arrival,
                choose.choice([1, 5, 20, 60]),
                choose.choice([None, *"abcd"]),
                priority=choose.choice([BATCH, INTERACTIVE]),
                now=float(now),
            )
            left[sequence] = choose.randrange(1, 12)
            yielded[sequence] = 0
            arrival += 1
        residents(machine).poll(machine.wanted_adapters())
        step = play(machine, float(now))
        assert not step.failed
        assert step.rows or not machine.waiting, "idle while somebody waits"
        for waiting in machine.waiting:
            yielded[waiting] += any(r.sequence.arrival > waiting.arrival for r in step.rows)
        for row in step.rows:
            if row.sequence.num_uncomputed == 1:
                left[row.sequence] -= 1
                if not left[row.sequence]:
                    machine.remove(row.sequence)
    assert not machine.waiting and not machine.running
    limits = machine._limits
    for sequence, seconds in yielded.items():
        is_batch = sequence.request.priority is BATCH
        # One step more: who becomes overdue during a step gives others their way in the next.
        assert seconds <= (limits.max_batch_wait_s if is_batch else limits.max_wait_s) + 1
