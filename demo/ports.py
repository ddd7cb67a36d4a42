"""Free TCP ports on the loopback address."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
from collections.abc import Collection

from demo.errors import StepFailed

HOST = "127.0.0.1"
#: SeaweedFS listens for gRPC this far above every port it is given.
GRPC_OFFSET = 10_000
# Below the ephemeral range of Linux (32768 on), also with the gRPC offset, so that no outgoing
# connection takes a port after it is chosen and before it is bound; and no port is another one's
# gRPC port.
_FIRST, _LAST = 11_000, 21_000


#: Sockets that keep other processes from ports that this one has chosen; the oldest can go.
_claims: collections.deque[socket.socket] = collections.deque()
_MOST_CLAIMS = 100


def _claim(port: int) -> bool:
    """Claim the port, unless another process that uses `choose_ports` has. -> whether it did.

    The claim is a name in Linux's abstract namespace, which ends with the process.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0lorikeet-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    if len(_claims) > _MOST_CLAIMS:
        _claims.popleft().close()
    return True


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def are_free(ports: Collection[int]) -> bool:
    """Return whether each port, and its gRPC port, can be bound."""
    return all(is_free(port) and is_free(port + GRPC_OFFSET) for port in ports)


def choose_ports(count: int) -> list[int]:
    """Return `count` different ports that are free now, and whose gRPC ports are free.

    Raises StepFailed when this machine has too few.
    """
    chosen: list[int] = []
    # Random and claimed, so that two stacks that start at the same time choose different ports.
    for port in random.sample(range(_FIRST, _LAST), _LAST - _FIRST):
        if are_free([port]) and _claim(port):
            chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise StepFailed(
        f"fewer than {count} free ports between {_FIRST} and {_LAST} on {HOST}",
        advice="stop some of the servers on this machine, then try again",
    )


class HeldPorts:
    """Stops others that use this file from choosing these ports, until `release`.

    Ports that cannot be held, because an old connection still exists, are skipped.
    """

    def __init__(self, ports: Collection[int]) -> None:
        self._sockets = []
        for port in ports:
            for number in (port, port + GRPC_OFFSET):
                holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                self._sockets.append(holder)
                # Without SO_REUSEADDR, so that `is_free` sees it although it does not listen.
                with contextlib.suppress(OSError):
                    holder.bind((HOST, number))

    def release(self) -> None:
        for holder in self._sockets:
            holder.close()
        self._sockets.clear()
