"""Runs work beside the step loop, each call on a thread of its own.

Threads are daemons and belong to no pool: a thread that hangs, because the disk hangs, blocks no
other and does not keep the process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def start_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call `function` on a new thread; the future has what it returns or raises.

    If the process cannot start another thread, the future raises RuntimeError.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="adapter-loader", daemon=True).start()
    except RuntimeError as error:
        future.set_exception(error)
    return future
