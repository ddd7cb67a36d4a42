"""A process that computes on a stranger's bytes and reaches nothing else.

`serve` is the child's side of `controlplane.infra.sealed_child`: it limits itself, then reads the
bytes. Of what holds afterwards, each wall is enough for the first two lines below, so a kernel
without one still has the other:

- no file, socket or other descriptor can be opened: seccomp allows only the system calls of a
  computation, and the limit of open descriptors is 0;
- no program or process can be started: seccomp, and a limit of 0 processes (not for root);
- memory and CPU time have limits of the kernel; nothing can be written but the answer.
"""

from __future__ import annotations

import ctypes
import encodings.unicode_escape  # noqa: F401  # codecs are files, which cannot be opened later
import errno
import io
import json
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, cast

#: Exit code of the child when memory ran out.
OUT_OF_MEMORY = 3
#: Largest description of the work that the parent writes to standard input, in bytes.
MAX_WORK_BYTES = 1 << 20

#: A function that works on open files and returns the answer to send as JSON.
Work = Callable[[dict[str, Any], list[BinaryIO]], dict[str, Any]]

# Numbers of linux/audit.h and of each architecture's asm/unistd.h: read, write, close, lseek,
# mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, pread64, sched_yield,
# mremap, madvise, getpid, exit, getrusage, gettimeofday, sigaltstack, futex, restart_syscall,
# clock_gettime, exit_group, getrandom.
_CALLS = {
    "x86_64": (0xC000003E, (
        0, 1, 3, 8, 9, 10, 11, 12, 13, 14, 15, 17, 24, 25, 28, 39, 60, 98, 96, 131, 202, 219, 228,
        231, 318,
    )),
    "aarch64": (0xC00000B7, (
        63, 64, 57, 62, 222, 226, 215, 214, 134, 135, 139, 67, 124, 216, 233, 172, 93, 165, 169,
        132, 98, 128, 113, 94, 278,
    )),
}  # fmt: skip
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000


def serve(work: Work) -> None:
    """Run the child: read the work's description, seal the process, work, answer, end.

    argv: memory in bytes, CPU seconds, then the descriptors of the files. The answer is one JSON
    object: {"answer": …, "walls": [names], "peak_bytes": n}, or {"failed": where} after an
    exception, without its message, which may quote a stranger.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_DUMPABLE, 0)
    memory_bytes, cpu_s, *descriptors = map(int, sys.argv[1:])
    described = json.loads(sys.stdin.buffer.read(MAX_WORK_BYTES))
    files = [cast(BinaryIO, io.FileIO(descriptor)) for descriptor in descriptors]
    with io.FileIO("/proc/self/status") as status:
        walls = _seal(prctl, memory_bytes, cpu_s)
        try:
            sent: dict[str, Any] = {"answer": work(described, files)}
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            sent = {"failed": _where(error)}
        told: dict[str, Any] = {"walls": walls, "peak_bytes": _peak_bytes(status)}
    _send(json.dumps(sent | told).encode())
    os._exit(0)


def _seal(prctl: Any, memory_bytes: int, cpu_s: int) -> list[str]:
    """Take this process's rights away, which cannot be undone. -> the walls that the kernel has."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    for limit, soft, hard in (
        (resource.RLIMIT_AS, used + memory_bytes, used + memory_bytes),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_NOFILE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))
    return ["limits", *(["seccomp"] if _filter_calls(prctl) else [])]


def _filter_calls(prctl: Any) -> bool:
    """Make the kernel refuse all other system calls. -> False where it cannot."""
    if platform.machine() not in _CALLS:
        return False
    program = _program(*_CALLS[platform.machine()])
    code = ctypes.create_string_buffer(program)
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0) == 0)


def _program(architecture: int, calls: tuple[int, ...]) -> bytes:
    """Return the filter, in the form of linux/filter.h: (code, then, else, value) by steps."""
    steps = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
        *((_JUMP_IF_EQUAL, len(calls) - i, 0, number) for i, number in enumerate(calls)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _where(error: Exception) -> str:
    frames = [
        f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return f"{type(error).__name__} at {', '.join(frames[-5:])}"


def _peak_bytes(status: io.FileIO) -> int:
    status.seek(0)
    for line in status.read(1 << 14).splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _send(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
