"""Requests are given up when nothing could make them end in time, and not before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import DeadlineExceeded, DeadlineUnreachable, Engine, FinishReason
from engine.scheduling.deadlines import Pace
from tests.engine.conftest import MakeEngine, Result, name_of, prompt, request, run


class StepClock:
    """A clock on which a step takes 1 s and 10 ms a token."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def run(self, engine: Engine, until: Callable[[], bool] = lambda: False) -> dict[str, Result]:
        results: dict[str, Result] = {}
        while engine.has_work() and not until():
            before = {s: s.num_computed for s in engine._scheduler.running}
            for output in engine.step():
                results.setdefault(name_of(output), Result()).add(output)
            engine.check_integrity()
            num_tokens = sum(s.num_computed - before.get(s, 0) for s in engine._scheduler.running)
            self.now += 1.0 + 0.01 * num_tokens
        return results


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


def warm(make_engine: MakeEngine, clock: StepClock, **config: int) -> Engine:
    """An engine that knows how fast it is."""
    engine = make_engine(clock=clock, **{"max_step_tokens": 32, **config})
    engine.add(request("warm", prompt(9, 100), max_tokens=10))
    clock.run(engine)
    return engine


def test_a_prompt_too_long_for_its_deadline_is_given_up_at_once(
    make_engine: MakeEngine, clock: StepClock
) -> None:
    engine = warm(make_engine, clock)
    engine.add(request("r", prompt(1, 400), deadline=clock.now + 4))  # 13 steps of 1.3 s
    (output,) = engine.step()
    assert isinstance(output.error, DeadlineUnreachable)
    assert output.error.code == "deadline_exceeded" and output.error.param == "deadline"
    assert output.num_generated == 0


def test_one_that_may_make_it_goes_on(make_engine: MakeEngine, clock: StepClock) -> None:
    """Half of the least that it takes is what counts: more could be noise."""
    engine = warm(make_engine, clock)
    start = clock.now
    engine.add(request("r", prompt(1, 400), max_tokens=2, deadline=start + 12))
    result = clock.run(engine)["r"]
    assert isinstance(result.error, DeadlineExceeded)
    assert clock.now < start + 14
    engine.add(request("s", prompt(2, 400), max_tokens=2, deadline=clock.now + 20))
    assert clock.run(engine)["s"].finish_reason == FinishReason.LENGTH


def test_those_that_would_have_made_it_do(make_engine: MakeEngine, clock: StepClock) -> None:
    """With just the time that each takes alone, every length ends well."""
    engine = warm(make_engine, clock, prefix_cache=False)
    for length in (1, 31, 32, 33, 64, 200, 400):
        start = clock.now
        engine.add(request("a", prompt(length, length), max_tokens=3, min_tokens=3))
        clock.run(engine)
        needed = clock.now - start
        made = request(
            "b", prompt(length, length), max_tokens=3, min_tokens=3, deadline=clock.now + needed
        )
        engine.add(made)
        assert clock.run(engine)["b"].finish_reason == FinishReason.LENGTH


def test_what_the_prefix_cache_has_counts_as_done(
    make_engine: MakeEngine, clock: StepClock
) -> None:
    engine = warm(make_engine, clock)
    engine.add(request("first", prompt(1, 400), max_tokens=1))
    clock.run(engine)
    engine.add(request("again", prompt(1, 400), max_tokens=1, deadline=clock.now + 4))
    engine.add(request("other", prompt(2, 400), max_tokens=1, deadline=clock.now + 4))
    results = clock.run(engine)
    assert results["again"].finish_reason == FinishReason.LENGTH
    assert isinstance(results["other"].error, DeadlineUnreachable)


def test_tokens_that_must_be_generated_count(make_engine: MakeEngine, clock: StepClock) -> None:
    engine = warm(make_engine, clock)
    engine.add(request("r", [1, 2], min_tokens=50, max_tokens=60, deadline=clock.now + 20))
    engine.add(request("s", [1, 2], max_tokens=60, deadline=clock.now + 20))
    results = clock.run(engine)
    assert isinstance(results["r"].error, DeadlineUnreachable)
    assert results["r"].token_ids == []
    assert type(results["s"].error) is DeadlineExceeded  # it might have ended at any token
    assert len(results["s"].token_ids) > 10


def test_a_request_that_waits_too_long_is_given_up_before_its_deadline(
    make_engine: MakeEngine, clock: StepClock
) -> None:
    engine = warm(make_engine, clock, max_running=1)
    engine.add(request("long", [1, 2], max_tokens=100))
    deadline = clock.now + 30
    engine.add(request("r", prompt(1, 400), n=2, deadline=deadline))
    results = clock.run(engine, until=lambda: "r" not in engine._requests)
    assert isinstance(results["r"].error, DeadlineUnreachable)
    assert deadline - 10 < clock.now < deadline
    run(engine)


def test_without_experience_nothing_is_given_up(make_engine: MakeEngine, clock: StepClock) -> None:
    engine = make_engine(clock=clock, max_step_tokens=32)
    engine.add(request("r", prompt(1, 400), deadline=clock.now + 4))
    assert type(clock.run(engine)["r"].error) is DeadlineExceeded


def test_the_pace_is_the_fastest_ever_seen() -> None:
    pace = Pace(max_step_tokens=10)
    for i, (seconds, num_tokens) in enumerate([(2.0, 1), (1.0, 1), (3.0, 10), (4.0, 8)] * 2):
        pace.start(10.0 * i, num_tokens)
        assert pace.least_s(100, 5) == 0.0
        pace.stop(10.0 * i + seconds)
        pace.stop(10.0 * i + 9)  # measures nothing
    assert pace.least_s(0, 5) == 0.5 * 5 * 1.0
    assert pace.least_s(7, 0) == 0.5 * 0.3 * 7
    pace.start(0.0, 10)
    pace.stop(0.0)  # a clock that stands still says nothing
    assert pace.least_s(0, 1) == 0.5
