"""Tasks that end when they are cancelled, and whose errors are reported.

Before Python 3.12 `asyncio.wait_for`, which the Redis client uses to send, may lose a cancellation:
if its result comes in the same iteration of the loop, it returns that, and the task continues. So
tasks are cancelled until they have ended. `asyncio.TaskGroup` and `asyncio.timeout` cancel once: do
not use them around Redis commands.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

CANCEL_AGAIN_S = 0.02
_TURNS = 32


class Tasks:
    """Owns the tasks of one purpose.

    on_failure  called with the error of a task that failed, before `end`
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._is_ending:
            self._on_failure(error)

    async def end(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        self._is_ending = True
        turns = 0
        while running := list(self._running):
            # A timer runs after what was read, so always just after the next command was sent,
            # where cancellations are lost: each further try waits for more iterations.
            for _ in range(turns):
                await asyncio.sleep(0)
            turns = random.randrange(_TURNS)
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
