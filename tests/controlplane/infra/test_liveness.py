"""A web process that has sent a task and then nothing for a minute is not stuck; beat is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery.signals import after_task_publish, beat_init

from controlplane.infra.health import liveness


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(liveness, "_noted_at", None)
    monkeypatch.setattr(liveness, "SILENCE_S", 0.0)  # whatever was recorded was long ago
    yield
    after_task_publish.disconnect(liveness.note_alive)


def test_a_process_that_only_sends_tasks_has_no_loop_to_be_stuck_in() -> None:
    after_task_publish.send(sender="a task")
    assert liveness.is_alive()


def test_beat_is_stuck_when_it_sends_no_more() -> None:
    beat_init.send(sender=None)
    assert liveness.is_alive()
    after_task_publish.send(sender="a task")
    assert not liveness.is_alive()
