"""Which worker a job goes to."""

from __future__ import annotations

from typing import Any

from controlplane.workers import NOT_RESIDENT_COST, WorkerStatus, best_worker
from worker.protocol import AdapterRef, GenerateJob, Heartbeat


def worker(name: str, *, silent_s: float = 0.0, base: str = "b", **fields: Any) -> WorkerStatus:
    heartbeat = Heartbeat(
        worker_id=name,
        boot_id="x",
        pool="p",
        base_model=base,
        base_revision="r",
        device="cpu",
        **fields,
    )
    return WorkerStatus(heartbeat=heartbeat, silent_s=silent_s)


def choose(*workers: WorkerStatus, digests: tuple[str, ...] = ()) -> str | None:
    adapters = tuple(
        AdapterRef(digest=digest, config_key="", tensors_key="", num_bytes=1) for digest in digests
    )
    job = GenerateJob(
        request_id="r",
        tenant_id="t",
        api_key_id="k",
        gateway_id="g",
        model="m",
        base_model="b",
        adapters=adapters,
    )

    def load(status: WorkerStatus) -> int:
        return status.heartbeat.running + status.heartbeat.waiting

    chosen = best_worker(workers, job, load)
    return chosen and chosen.heartbeat.worker_id


def test_the_least_loaded() -> None:
    assert choose(worker("a", running=3), worker("b", running=1, waiting=1)) == "b"


def test_one_that_has_the_adapter_unless_it_is_much_busier() -> None:
    few, many = (
        worker("b", running=NOT_RESIDENT_COST + more, resident_digests=("d",)) for more in (-1, 1)
    )
    assert choose(worker("a"), few, digests=("d",)) == "b"
    assert choose(worker("a"), many, digests=("d",)) == "a"


def test_when_none_is_alive_the_one_heard_of_last() -> None:
    killed_before, killed_now = worker("a", silent_s=40), worker("b", silent_s=15, running=5)
    assert choose(killed_before, killed_now) == "b"
    assert choose(killed_before, killed_now, worker("c")) == "c"


def test_only_one_of_the_base_model() -> None:
    assert choose(worker("a", base="other")) is None


def test_not_one_that_drains() -> None:
    assert choose(worker("a", draining=True), worker("b", running=9)) == "b"


def test_one_that_restarts_only_when_no_other_lives() -> None:
    assert choose(worker("a", silent_s=20), worker("b", running=9)) == "b"
    assert choose(worker("a", silent_s=20)) == "a"


def test_one_that_loads_only_when_no_other_is_ready() -> None:
    loading = worker("a", loading=True)
    assert choose(loading, worker("b", running=9)) == "b"
    assert choose(loading, worker("b", draining=True)) == "a"
    assert choose(loading, worker("b", silent_s=20)) == "a"


def test_not_one_that_is_long_dead() -> None:
    assert choose(worker("a", silent_s=70)) is None
