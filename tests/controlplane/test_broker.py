"""Queueing a task while the broker takes connections and says nothing: a paused Redis."""

from __future__ import annotations

import socket
import time

import pytest
from kombu.exceptions import OperationalError

from controlplane.celery import app
from controlplane.files.tasks import files_sweep


def test_a_silent_broker_holds_nobody_up_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with app.connection_for_write(url) as connection, pytest.raises(OperationalError):
            files_sweep.apply_async(connection=connection, retry=False)
        assert time.monotonic() - started < 30
