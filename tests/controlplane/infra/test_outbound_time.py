"""The whole of a call ends in its time, wherever it is spent."""

from __future__ import annotations

import socket
import time

import pytest

from controlplane.infra.outbound import outbound
from controlplane.infra.outbound.outbound import Bounds, CallFailed
from controlplane.infra.outbound.outbound_policy import OutboundPolicy
from tests.controlplane.infra.test_outbound import LOOPBACK


def test_the_handshake_has_what_connecting_left(
    settings: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver, a connection and a handshake that are slow together."""
    usual = outbound._Socket.connect

    def slow(self: outbound._Socket, address: tuple[str, int]) -> None:
        time.sleep(0.6)
        usual(self, address)

    monkeypatch.setattr(outbound._Socket, "connect", slow)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        host = f"silent.example.test:{port}"
        policy = OutboundPolicy(hosts=frozenset({host}), allowed=LOOPBACK)
        settings.OUTBOUND = policy  # type: ignore[attr-defined]

        def resolver(name: str, port: int) -> list[str]:
            time.sleep(0.2)
            return ["127.0.0.1"]

        began = time.monotonic()
        bounds = Bounds(connect_s=1.0, total_s=1.0)
        with pytest.raises(CallFailed):
            with outbound.call("GET", f"https://{host}/", bounds=bounds, resolver=resolver):
                pass
        assert time.monotonic() - began < 1.5
