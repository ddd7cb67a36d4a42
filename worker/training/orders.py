"""The orders on a trainer's standard input: JSON objects, one a line."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

_READ_BYTES = 1 << 16
_MOST_LOCKS = 8

#: Key for the number, in this process, of the descriptor that came with an order.
LOCK = "lock"


def read_orders() -> Iterator[dict[str, Any]]:
    """Yield the orders until their end.

    Where standard input is a socket, an order with `LOCK` comes with a descriptor, which whoever
    obeys it closes: what it locks stays locked for as long as this process has it open.
    """
    if not stat.S_ISSOCK(os.fstat(sys.stdin.fileno()).st_mode):
        for line in sys.stdin:
            yield json.loads(line)
        return
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as connection:
        locks: deque[int] = deque()
        rest = b""
        while True:
            data, received, _, _ = socket.recv_fds(connection, _READ_BYTES, _MOST_LOCKS)
            if not data:
                return
            locks.extend(received)  # each comes with its line's first byte, so before its end
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if LOCK in order:
                    order[LOCK] = locks.popleft()
                yield order
