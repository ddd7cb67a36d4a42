"""EngineLoop: the thread that steps an engine, and how other threads call it.

The engine must be used from one thread and not be interrupted inside a step: Ctrl-C goes to the
main thread, which is not this one. Calls of other threads are queued and run between two steps;
outputs go to the queue that came with the request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from engine.engine import Engine
from engine.errors import EngineError
from engine.request import FinishReason, RequestOutput

log = logging.getLogger(__name__)

# Seconds of calls between two steps, so that the first of many requests run while the others are
# still being added.
_CALLS_S = 0.02

T = TypeVar("T")
# Items: the outputs of one step as a list, or a RuntimeError if the loop has ended.
Outputs = SimpleQueue[Any]


class EngineLoop:
    """Owns an engine; all methods may be called from any thread.

    make  builds the engine on the thread that steps it: on a CPU each thread has its own team of
          OpenMP threads, and two teams compete for all cores (docs/history/performance.md). The
          constructor raises what `make` raises.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._calls: SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]]] = SimpleQueue()
        self._readers: dict[str, Outputs] = {}
        self._left: dict[str, int] = {}  # continuations of a request that have not ended
        self._lock = threading.Lock()  # guards `_end`: no call is queued after the last one
        self._end: RuntimeError | None = None
        self._is_closing = False
        made: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, made), name="engine", daemon=True
        )
        self._thread.start()
        self.model = made.result().model

    def call(self, action: Callable[[Engine], T]) -> Future[T]:
        """Run `action` between two steps; the future has its result or exception.

        Raises RuntimeError when the loop has ended.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._end is not None:
                raise self._end
            self._calls.put((action, future))
        return future

    def add(self, request_id: str, n: int, add: Callable[[Engine], None], outputs: Outputs) -> None:
        """Have `add` give a request to the engine; lists of its outputs go to `outputs`.

        An exception of `add` ends all n continuations, like any other error. If the loop ends, a
        RuntimeError comes in place of the last outputs.
        """

        def action(engine: Engine) -> None:
            self._readers[request_id], self._left[request_id] = outputs, n
            try:
                add(engine)
            except Exception as error:
                error = _as_engine_error(error)
                self._deliver([_failed(request_id, index, error) for index in range(n)])

        self.call(action)

    def cancel(self, request_id: str, reason: FinishReason, index: int | None = None) -> None:
        """End a request, or one of its n continuations; do nothing if it or the loop has ended."""
        try:
            self.call(lambda engine: engine.cancel(request_id, reason, index))
        except RuntimeError:
            return

    def close(self) -> None:
        """End the thread and the engine's threads after the current step; idempotent."""
        self._is_closing = True
        try:
            self.call(lambda engine: None)  # wakes the loop
        except RuntimeError:
            return
        self._thread.join()

    def _run(self, make: Callable[[], Engine], made: Future[Engine]) -> None:
        try:
            engine = make()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(engine)
        self._serve(engine)

    def _serve(self, engine: Engine) -> None:
        end = RuntimeError("the engine is closed")
        try:
            while not self._is_closing:
                self._do_calls(engine)
                self._deliver(engine.step())
        except Exception as error:
            log.exception("the engine failed")
            end = RuntimeError(f"the engine failed: {type(error).__name__}: {error}")
            end.__cause__ = error
        with self._lock:
            self._end = end
        while not self._calls.empty():
            self._calls.get()[1].set_exception(end)
        for reader in set(self._readers.values()):
            reader.put(end)
        engine.close()

    def _do_calls(self, engine: Engine) -> None:
        """Run queued calls for a while; if the engine is idle, sleep until one comes."""
        is_idle = not engine.has_work()
        end = None
        while end is None or time.monotonic() < end:
            try:
                action, future = self._calls.get(block=is_idle)
            except Empty:
                return
            is_idle = False
            end = end or time.monotonic() + _CALLS_S
            try:
                future.set_result(action(engine))
            except Exception as error:
                future.set_exception(error)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        news: dict[Outputs, list[RequestOutput]] = {}
        for output in outputs:
            reader = self._readers[output.request_id]
            news.setdefault(reader, []).append(output)
            if output.finish_reason is not None:
                self._left[output.request_id] -= 1
                if self._left[output.request_id] == 0:
                    del self._readers[output.request_id], self._left[output.request_id]
        for reader, own in news.items():
            reader.put(own)


def _failed(request_id: str, index: int, error: EngineError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, index=index, finish_reason=FinishReason.ERROR, error=error
    )


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    log.error("request failed", exc_info=error)
    wrapped = EngineError(f"internal error: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
