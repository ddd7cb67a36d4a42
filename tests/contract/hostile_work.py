"""What a stranger's bytes might do if they took over a sealed child; the first file says what."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from contract.process import sealed_process

if "WITHOUT_SECCOMP" in os.environ:
    sealed_process._CALLS.clear()

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: Callable[..., int], *arguments: Any) -> None:
    """Call C; raise OSError as Python's own functions do."""
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _ignore_and_spin(parent: int) -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    _spin(parent)


def _spin(_: int) -> None:
    while True:
        pass


def _hang(_: int) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _flood(_: int) -> None:
    while True:
        os.write(1, b"x" * 65536)


def _hoard(_: int) -> None:
    hoard = []
    while True:
        hoard.append(bytearray(10 << 20))


_ACTS: dict[str, Callable[[int], Any]] = {
    "open a socket": lambda parent: socket.socket(),
    "open a local socket": lambda parent: socket.socket(socket.AF_UNIX),
    "make a pair of sockets": lambda parent: socket.socketpair(),
    "read the parent's environment": lambda parent: open(f"/proc/{parent}/environ"),
    "read the parent's memory": lambda parent: open(f"/proc/{parent}/mem", "rb"),
    "read its own environment": lambda parent: open("/proc/self/environ"),
    "read a file": lambda parent: open("/etc/passwd"),
    "list a folder": lambda parent: os.listdir("/"),
    "write a file": lambda parent: open("/tmp/hostile", "w"),
    "duplicate a descriptor": lambda parent: os.dup(1),
    "make a pipe": lambda parent: os.pipe(),
    "fork": lambda parent: os.fork(),
    "start a program": lambda parent: os.execv(sys.executable, [sys.executable, "-V"]),
    "start a thread": lambda parent: threading.Thread(target=print).start(),
    "signal the parent": lambda parent: os.kill(parent, 0),
    "trace the parent": lambda parent: _call(_libc.ptrace, 16, parent, None, None),
    "copy the parent's memory": lambda parent: _call(
        _libc.process_vm_readv, parent, None, 0, None, 0, 0
    ),
    "raise its limits": lambda parent: resource.setrlimit(resource.RLIMIT_CPU, (900, 900)),
    "become another user": lambda parent: os.setuid(1),
    "allocate 2 GB": lambda parent: bytearray(2 << 30),
    "hoard": _hoard,
    "spin": _spin,
    "ignore the limit and spin": _ignore_and_spin,
    "hang": _hang,
    "flood": _flood,
    "crash": lambda parent: ctypes.string_at(0),
    "fail": lambda parent: {}["a tenant's secret"],
    "tell its environment": lambda parent: dict(os.environ),
    "lie": lambda parent: {"report": {"peft_version": "\0"}, "max_rank": 4},
}


def act(work: dict[str, Any], files: list[BinaryIO]) -> dict[str, Any]:
    name = files[0].read(200).decode()
    try:
        done = _ACTS[name](work.get("parent", 0))
    except OSError as error:
        return {"refused": error.errno}
    except (RuntimeError, ValueError):  # of a thread, of a limit
        return {"refused": 0}
    return done if isinstance(done, dict) else {"done": repr(done)[:100]}


if __name__ == "__main__":
    sealed_process.serve(act)
