"""Messages as tests need them: with what every one has, so that a test says what matters to it."""

from __future__ import annotations

from typing import Any

from contract.messages.protocol import Control, GenerateJob, Heartbeat


def make_job(**fields: Any) -> GenerateJob:
    """A job of these fields; of the rest, what a job must have."""
    needed = {
        "request_id": "r",
        "tenant_id": "t",
        "api_key_id": "k",
        "gateway_id": "g",
        "model": "m",
        "base_model": "b",
    }
    return GenerateJob(**(needed | fields))


def make_heartbeat(**fields: Any) -> Heartbeat:
    """A worker's heartbeat of these fields; of the rest, what one must have."""
    needed = {
        "worker_id": "w",
        "boot_id": "boot-1",
        "pool": "p",
        "base_model": "b",
        "base_revision": "r",
        "device": "cpu",
        "controls": tuple(control.value for control in Control),
    }
    return Heartbeat(**(needed | fields))
