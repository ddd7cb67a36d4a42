"""Repeated requests for an inspection, and what a worker tells of its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controlplane.adapters.models import AdapterInspection
from controlplane.evaluations.inspections import execution
from controlplane.events.audit.models import AuditEvent
from tests.controlplane.adapters.test_ingest import upload, validate
from tests.controlplane.conftest import Party, as_key
from tests.controlplane.evaluations.inspections.test_states import (
    AGREED,
    Probe,
    finding,
    inspector,
    probe_of,
    scope,
)

__all__ = ["finding", "inspector", "scope"]
PATH = "/api/v1/adapters/invoices/versions/1/doctor"


@pytest.mark.usefixtures("scope", "inspector")
def test_who_asks_again_while_it_waits_changes_nothing(
    acme: Party, finding: Callable[[object], None]
) -> None:
    version, client = validate(upload()), as_key(acme)
    finding("agrees")
    execution.inspect_next()
    asked = AuditEvent.objects.filter(action__endswith="inspection_requested")
    for _ in range(3):
        assert client.post(PATH).status_code == 202
        assert probe_of(version).status == Probe.WAITING
    assert asked.count() == 1
    assert execution.inspect_next()
    assert client.post(PATH).status_code == 202
    assert asked.count() == 2


@pytest.mark.usefixtures("scope", "inspector")
def test_what_the_worker_told_comes_before_the_estimate(
    acme: Party, finding: Callable[[object], None]
) -> None:
    validate(upload())
    finding("agrees")
    execution.inspect_next()
    before = as_key(acme).get(PATH).json()
    assert before["is_estimated"] and before["device_bytes"] > 0
    probe = {**AGREED["probe"], "device_bytes": 77_824, "load_ms": 12.5}
    AdapterInspection.objects.update(probe=probe)
    after = as_key(acme).get(PATH).json()
    assert (after["is_estimated"], after["device_bytes"]) == (False, 77_824)
    assert after["load_ms"] == 12.5
