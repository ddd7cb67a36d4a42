"""The number for an autoscaler: it follows the load, and asks for no worker too many."""

from __future__ import annotations

from typing import Any

import pytest

from contract.messages.protocol import Heartbeat
from controlplane.queue.desired_workers import FullSpeed, desired_workers

BASE: dict[str, Any] = {
    "running": 0,
    "max_running": 64,
    "waiting_requests": 0,
    "waiting_tokens": 0,
    "tokens_per_s": 1000.0,
    "target_wait_s": 10.0,
}


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        ({}, 1),  # without a worker requests would be refused
        ({"running": 64}, 1),
        ({"running": 128}, 2),
        ({"running": 64, "waiting_requests": 10, "waiting_tokens": 10_000}, 2),
        ({"running": 64, "waiting_requests": 400, "waiting_tokens": 45_000}, 6),
        ({"running": 3, "waiting_requests": 1, "waiting_tokens": 100}, 1),
        # Nobody was full yet, so that requests are all that is known.
        ({"running": 64, "waiting_requests": 65, "tokens_per_s": 0.0}, 3),
        # The last worker has gone.
        ({"max_running": 0, "waiting_requests": 5, "tokens_per_s": 0.0}, 1),
        ({"max_running": 0, "waiting_requests": 900, "waiting_tokens": 30_000}, 3),
    ],
)
def test_workers_follow_the_load(load: dict[str, Any], wanted: int) -> None:
    assert desired_workers(**(BASE | load)) == wanted


def beat(worker_id: str, step: int, running: int, tokens_per_s: float) -> Heartbeat:
    return Heartbeat(
        worker_id=worker_id,
        step=step,
        boot_id="b",
        pool="p",
        base_model="m",
        base_revision="r",
        device="cpu",
        running=running,
        max_running=8,
        tokens_per_s=tokens_per_s,
    )


def test_only_full_workers_show_what_one_can_do() -> None:
    speed = FullSpeed()
    speed.observe([beat("a", 1, 7, 900.0), beat("b", 1, 0, 0.0)])
    speed.observe([beat("a", 2, 8, 500.0)])  # it has only just become full
    speed.observe([beat("a", 2, 8, 500.0)])  # the same heartbeat
    assert speed.of("m") == 0.0
    speed.observe([beat("a", 3, 8, 100.0), beat("b", 2, 7, 900.0)])
    assert speed.of("m") == 100.0
    for step in range(4, 34):
        speed.observe([beat("a", step, 8, 200.0)])
    assert speed.of("m") == pytest.approx(200.0, rel=0.01)
    assert speed.of("another") == 0.0
