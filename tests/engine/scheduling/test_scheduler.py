"""Who runs next, without a model: budgets, order, preemption, adapters that are not there."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine import AdapterPart, OutOfPages, Priority, Request, SamplingParams
from engine.memory.page_pool import PagePool, PageUse
from engine.memory.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waiting_queue import SchedulerLimits
from engine.sequence import Sequence, Step
from engine.stats import PreemptionCause


class Residents:
    """The store as the scheduler sees it; idle adapters hold one page each."""

    def __init__(self, pool: PagePool, *digests: str) -> None:
        self.pool = pool
        self.pages = {digest: pool.take(1, PageUse.ADAPTER) for digest in digests}
        self.pins = dict.fromkeys(digests, 0)
        self.without_room: set[str] = set()
        self.is_copying = False

    def is_resident(self, digest: str) -> bool:
        return digest in self.pages

    def lacks_room(self, digest: str) -> bool:
        return digest in self.without_room

    def num_pages(self, digest: str) -> int:
        return 1

    def pin(self, digest: str) -> None:
        self.pins[digest] += 1

    def unpin(self, digest: str) -> None:
        self.pins[digest] -= 1

    def evict_idle(self, num_pages: int, keep: Collection[str], use: PageUse = PageUse.KV) -> None:
        for digest in list(self.pages):
            if not self.pool.can_take(num_pages) and not self.pins[digest] and digest not in keep:
                self.pool.release(self.pages.pop(digest))

    def make_room(self, digest: str, keep: Collection[str]) -> bool:
        self.evict_idle(1, keep)
        return self.pool.can_take(1)

    def poll(self, wanted: Iterable[str]) -> None:
        """Load what is wanted and missing, in no time, where there is room."""
        earlier: set[str] = set()
        for digest in wanted:
            earlier.add(digest)
            if digest not in self.pages:
                self.evict_idle(1, keep=earlier)
                self.without_room.add(digest)
                if self.pool.can_take(1):
                    self.without_room.discard(digest)
                    self.pages[digest] = self.pool.take(1, PageUse.ADAPTER)
                    self.pins[digest] = 0


def scheduler(
    num_pages: int = 100,
    *digests: str,
    max_step_tokens: int = 64,
    max_running: int = 8,
    max_adapters: int | None = None,
    **limits: float,
) -> Scheduler:
    pool = PagePool(num_pages)
    # The requests here have the same tokens and are to be computed all the same.
    return Scheduler(
        pool=pool,
        prefixes=PrefixCache(pool, is_enabled=False),
        adapters=Residents(pool, *digests),
        page_size=16,
        let_pinned_go=lambda: False,
        limits=SchedulerLimits(
            max_running=max_running,
            max_adapters=max_adapters,
            max_step_tokens=max_step_tokens,
            max_skips=3,
            **limits,
        ),
    )


def add(
    machine: Scheduler,
    arrival: int,
    length: int,
    adapter: str | None = None,
    *,
    priority: Priority = Priority.INTERACTIVE,
    now: float = 0.0,
) -> Sequence:
    request = Request(
        request_id=str(arrival),
        token_ids=[1] * length,
        sampling=SamplingParams(),
        adapters=(AdapterPart(digest=adapter),) if adapter else (),
        priority=priority,
    )
    sequence = Sequence(request, arrival)
    machine.add(sequence, now)
    return sequence


def play(machine: Scheduler, now: float = 0.0) -> Step:
    """Schedule, and commit as if the model had run."""
    step = machine.schedule(now)
    machine.check_integrity()
    for row in step.rows:
        samples = row.samples
        machine.commit(row)
        if samples:
            row.sequence.token_ids.append(1)
    return step


def rows(step: Step) -> list[tuple[int, int]]:
    return [(row.sequence.arrival, row.num_tokens) for row in step.rows]


def test_a_prompt_is_cut_into_chunks_and_decodes_go_first() -> None:
    machine = scheduler()
    add(machine, 0, 4)
    add(machine, 1, 150)
    assert rows(play(machine)) == [(0, 4), (1, 60)]
    assert rows(play(machine)) == [(0, 1), (1, 63)]
    assert rows(play(machine)) == [(0, 1), (1, 27)]
    assert rows(play(machine)) == [(0, 1), (1, 1)]


def test_no_more_than_max_running_are_admitted() -> None:
    machine = scheduler(max_running=2)
    for i in range(4):
        add(machine, i, 3)
    assert rows(play(machine)) == [(0, 3), (1, 3)]
    machine.remove(machine.running[0])
    assert rows(play(machine)) == [(1, 1), (2, 3)]


def test_rows_of_one_adapter_are_adjacent() -> None:
    machine = scheduler(100, "a", "b")
    for i, adapter in enumerate(["a", None, "b", "a", None, "b"]):
        add(machine, i, 2, adapter)
    assert [arrival for arrival, _ in rows(play(machine))] == [0, 3, 1, 4, 2, 5]


def test_a_request_without_its_adapter_blocks_nobody() -> None:
    machine = scheduler(100, "here")
    add(machine, 0, 3, "elsewhere")
    add(machine, 1, 3, "here")
    assert rows(play(machine)) == [(1, 3)]


def test_a_request_that_only_lacks_pages_is_overtaken_a_bounded_number_of_times() -> None:
    machine = scheduler(100, "here")
    residents = machine._adapters
    assert isinstance(residents, Residents)
    residents.without_room.add("big")
    add(machine, 0, 3, "big")
    admitted = []
    for i in range(1, 8):
        add(machine, i, 3, "here")
        admitted += [arrival for arrival, count in rows(play(machine)) if count == 3]
    assert admitted == [1, 2, 3]


def test_the_youngest_is_preempted_and_returns_in_order() -> None:
    machine = scheduler(3)
    for i in range(2):
        add(machine, i, 16)
    play(machine)
    assert rows(play(machine)) == [(0, 1)]  # the third page goes to the elder
    assert machine.preemptions == {PreemptionCause.PAGES: 1}
    assert [sequence.arrival for sequence in machine.waiting] == [1]
    late = add(machine, 2, 1)
    assert rows(play(machine)) == [(0, 1)]  # 1 needs two pages, and 2 does not overtake it
    machine.remove(machine.running[0])
    assert rows(play(machine)) == [(1, 17), (2, 1)]
    assert late.is_running


def test_idle_adapters_go_before_anyone_is_preempted() -> None:
    machine = scheduler(3, "idle")
    for i in range(2):
        add(machine, i, 16)
    play(machine)
    machine.remove(machine.running[1])
    assert rows(play(machine)) == [(0, 1)]
    add(machine, 2, 16)
    assert rows(play(machine)) == [(0, 1), (2, 16)]
    assert not machine.preemptions
    assert not machine._adapters.is_resident("idle")


def test_a_request_too_large_for_the_pool_fails_alone() -> None:
    machine = scheduler(2)
    add(machine, 0, 33)
    add(machine, 1, 5)
    step = machine.schedule(0.0)
    assert [(s.arrival, type(error)) for s, error in step.failed] == [(0, OutOfPages)]
    assert rows(step) == [(1, 5)]


def test_it_waits_while_an_adapter_is_being_copied() -> None:
    machine = scheduler(2)
    assert isinstance(machine._adapters, Residents)
    machine._adapters.is_copying = True
    add(machine, 0, 33)
    step = machine.schedule(0.0)
    assert not step.rows and not step.failed


def test_an_adapter_that_others_leave_no_room_for_fails_its_request_alone() -> None:
    """As when prefixes are pinned after a request was accepted."""
    machine = scheduler(4)
    pinned = machine._pool.take(3, PageUse.KV)
    for i, adapter in enumerate([None, "a"]):
        add(machine, i, 3, adapter)
    assert rows(play(machine)) == [(0, 3)]
    machine._adapters.poll(["a"])
    assert not play(machine).failed, "its room may come when the other ends"
    machine.remove(machine.running[0])
    pinned += machine._pool.take(1, PageUse.KV)
    step = play(machine)
    assert [(s.arrival, type(error)) for s, error in step.failed] == [(1, OutOfPages)]
    machine._pool.release(pinned[:2])
    assert not play(machine).failed, "it is copied now"


def test_no_more_than_max_adapters_run_at_a_time() -> None:
    machine = scheduler(100, "a", "b", "c", max_adapters=2)
    for i, adapter in enumerate(["a", "b", "c", "a", None]):
        add(machine, i, 2, adapter)
    assert sorted(rows(play(machine))) == [(0, 2), (1, 2), (3, 2), (4, 2)]
    machine.remove(machine.running[1])
    assert (2, 2) in rows(play(machine))
