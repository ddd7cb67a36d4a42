"""Tenants and their runs take turns."""

from __future__ import annotations

from collections import Counter

from engine.training.scheduler import MAX_SKIPS, Scheduler


def begin_all(scheduler: Scheduler) -> list[str]:
    begun = []
    while (run_id := scheduler.next_waiting()) is not None:
        scheduler.begin(run_id)
        begun.append(run_id)
    return begun


def test_a_tenants_thousand_runs_delay_anothers_by_the_end_of_one() -> None:
    scheduler = Scheduler()
    for number in range(1000):
        scheduler.add(f"many-{number}", "many")
    for _ in range(4):  # the places there are
        scheduler.begin(scheduler.next_waiting() or "")
    scheduler.add("one", "other")
    scheduler.remove("many-0")
    assert scheduler.next_waiting() == "one"


def test_tenants_share_by_tokens_not_by_runs() -> None:
    scheduler = Scheduler()
    for number in range(20):
        scheduler.add(f"a{number}", "a")
    scheduler.add("b0", "b")
    scheduler.add("b1", "b")
    begin_all(scheduler)
    given: Counter[str] = Counter()
    sizes = {f"a{number}": 10 for number in range(20)} | {"b0": 40, "b1": 40}
    for _ in range(50):
        for run_id in scheduler.select(sizes, 100):
            given[run_id[0]] += sizes[run_id]
    assert sum(given.values()) == 50 * 100
    assert abs(given["a"] - given["b"]) <= 100


def test_a_micro_batch_has_each_run_once_and_keeps_to_its_budget() -> None:
    scheduler = Scheduler()
    for name in "abc":
        scheduler.add(name, name)
    begin_all(scheduler)
    assert scheduler.select({"a": 30, "b": 30, "c": 30}, 1000) == ["a", "b", "c"]
    assert scheduler.select({"a": 700, "b": 300, "c": 300}, 600) == ["a"]
    assert scheduler.select({"a": 700, "b": 300, "c": 300}, 600) == ["b", "c"]
    taking_turns = [scheduler.select({"a": 10, "b": 10, "c": 10}, 600, 1) for _ in range(100)]
    assert {len(chosen) for chosen in taking_turns} == {1}
    assert {chosen for [chosen] in taking_turns} == {"a", "b", "c"}


def test_within_a_tenant_the_first_goes_first_and_is_overtaken_a_few_times_only() -> None:
    scheduler = Scheduler()
    scheduler.add("other", "x")
    for number in range(5):
        scheduler.add(f"run-{number}", "y")
    begin_all(scheduler)
    sizes = {"other": 30, "run-0": 80} | {f"run-{number}": 10 for number in range(1, 5)}
    waited = longest = 0
    for _ in range(200):
        waited = 0 if "run-0" in scheduler.select(sizes, 100) else waited + 1
        longest = max(longest, waited)
    assert longest <= MAX_SKIPS


def test_who_comes_back_has_not_saved_up_turns() -> None:
    scheduler = Scheduler()
    for name in ("a", "b"):
        scheduler.add(name, name)
    begin_all(scheduler)
    for _ in range(10):
        scheduler.select({"a": 50, "b": 50}, 100)
    scheduler.remove("b")
    for _ in range(10):
        scheduler.select({"a": 100}, 100)
    scheduler.add("b", "b")
    begin_all(scheduler)
    chosen = [scheduler.select({"a": 100, "b": 100}, 100)[0] for _ in range(6)]
    assert Counter(chosen) == {"a": 3, "b": 3}
