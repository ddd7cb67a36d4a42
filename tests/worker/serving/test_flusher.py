"""Whose news goes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from contract.queue.reply_streams import batch_stream_id
from worker.serving.flusher import turn


def test_nobody_waits_behind_a_batchs_answers() -> None:
    def about(gateway_id: str) -> Any:
        return SimpleNamespace(job=SimpleNamespace(gateway_id=gateway_id))

    ids = [batch_stream_id("0a"), "gw-2", batch_stream_id("ff"), "gw-1"]
    in_order = [request.job.gateway_id for request in sorted(map(about, ids), key=turn)]
    assert in_order == ["gw-1", "gw-2", batch_stream_id("0a"), batch_stream_id("ff")]
