"""A batch's lines on their way through the queue: some at a time, each until it has an answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from controlplane.batches import lines
from controlplane.batches.lines import Line, Request
from controlplane.batches.pace import Pace
from controlplane.batches.results import Result
from controlplane.errors import ApiError, GivenUp, InternalError
from controlplane.inference.service import Generation, new_request_id, submit
from controlplane.tenants.auth import Principal

log = logging.getLogger(__name__)

#: Lines in memory at a time, and their bytes.
MAX_HELD = 256
MAX_HELD_BYTES = 32 * 1024**2
#: Results that wait to be written; then lines wait.
MAX_UNWRITTEN = 500
WRITE_S = 0.2
#: A line whose generation fails for no fault of its own is tried so often.
MAX_ATTEMPTS = 8
MAX_WAIT_S = 60.0
#: A budget that is spent may be raised, or its period end.
BUDGET_WAIT_S = 30.0


class _Refused(Exception):
    """The request was not accepted now; later it may be."""


class Drained(Exception):
    """The feeder was told to begin no more lines, and none is under way now."""


class Feeder:
    """Answers lines until there are no more. Cancelled, it cancels what is under way.

    deadline   Unix seconds; past it nobody wants the answers
    principal  who asks, as it stands at that moment
    keep       writes results; it is not called twice at a time
    """

    def __init__(
        self,
        *,
        batch_id: uuid.UUID,
        endpoint: str,
        deadline: float,
        principal: Callable[[], Principal],
        pace: Pace,
        keep: Callable[[list[Result]], Awaitable[None]],
    ) -> None:
        self._batch_id = batch_id
        self._endpoint = endpoint
        self._deadline = deadline
        self._principal = principal
        self._pace = pace
        self._keep = keep
        self._unwritten: asyncio.Queue[Result] = asyncio.Queue(MAX_UNWRITTEN)
        self._is_over = asyncio.Event()  # nothing more comes to be written
        self._freed = asyncio.Event()
        self._num_held = self._bytes_held = 0
        self._submitting = asyncio.Lock()
        self._closed_until = 0.0  # event loop's time; before it nothing is submitted
        self._is_draining = False
        self._waiting: set[asyncio.Task[None]] = set()  # lines that are not under way

    async def run(self, found: AsyncIterator[Line]) -> None:
        """Have every line answered and its result kept. Raises what `keep` raises, and Drained."""
        writing = asyncio.create_task(self._write())
        feeding = asyncio.create_task(self._feed(found))
        try:
            await asyncio.wait({writing, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            await feeding
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
            self._is_over.set()
            await asyncio.wait({writing})  # what was answered is kept, also when it stops here
        writing.result()

    def drain(self) -> None:
        """Begin no more lines; `run` ends with Drained once those under way are answered and kept.

        Their tokens are billed: cut off, they would be generated and billed again.
        """
        self._is_draining = True
        self._freed.set()
        for task in self._waiting:
            task.cancel()

    async def _feed(self, found: AsyncIterator[Line]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for line in found:
                    await self._hold(line)
                    if self._is_draining:
                        break
                    task = group.create_task(self._line(line))
                    self._waiting.add(task)
                    task.add_done_callback(self._waiting.discard)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if self._is_draining:
            raise Drained

    async def _hold(self, line: Line) -> None:
        """Wait until the line has room in memory."""
        while self._num_held >= MAX_HELD or self._bytes_held >= MAX_HELD_BYTES:
            if self._is_draining:
                return
            self._freed.clear()
            await self._freed.wait()
        self._num_held += 1
        self._bytes_held += len(line.body)

    async def _line(self, line: Line) -> None:
        try:
            result = await self._answer(line)
            if result is not None:
                await self._unwritten.put(result)
        finally:
            self._num_held -= 1
            self._bytes_held -= len(line.body)
            self._freed.set()

    async def _answer(self, line: Line) -> Result | None:
        """The line's result, after as many attempts as it takes; None when another is to do it."""
        attempt = 0
        while not self._is_draining:
            request_id = new_request_id()
            try:
                async with self._pace.place(self._batch_id), self._under_way():
                    request = lines.parse_request(line, self._endpoint)
                    generation = await self._submit(request, request_id)
                    try:
                        return _answered(line, request_id, await request.answer(generation))
                    finally:
                        generation.leave()
            except _Refused:
                await self._wait_until_open()
            except Exception as error:
                attempt += 1
                failure = self._told(line, error)
                if not _is_passing(failure) or attempt >= MAX_ATTEMPTS:
                    output = lines.error_line(line.custom_id, request_id, failure, self._endpoint)
                    return Result(line=line.number, is_error=True, output=output)
                if not self._is_draining:  # which cuts off those that sleep, not those about to
                    await asyncio.sleep(min(MAX_WAIT_S, 2.0**attempt * random.uniform(0.25, 0.5)))
        return None

    @contextlib.asynccontextmanager
    async def _under_way(self) -> AsyncIterator[None]:
        """Meanwhile the line is not one of those that a drain cuts off."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.discard(task)
        try:
            yield
        finally:
            if not task.done():
                self._waiting.add(task)

    def _told(self, line: Line, error: Exception) -> ApiError:
        """What the line's client is told; a fault of ours keeps no other line from its answer."""
        if isinstance(error, ApiError):
            return error
        log.error("line %s of batch %s failed", line.number, self._batch_id, exc_info=error)
        return InternalError("The server failed on this request.")

    async def _submit(self, request: Request, request_id: str) -> Generation:
        """Raises _Refused for what passes: a limit, a budget, a full queue, no worker.

        One at a time, so that the first refusal spares the others theirs.
        """
        async with self._submitting:
            if self._closed_for_s() > 0 or self._is_draining:
                raise _Refused
            try:
                return await submit(
                    self._principal(),
                    request.body,
                    request_id=request_id,
                    endpoint=self._endpoint,
                    is_batch=True,
                    deadline=self._deadline,
                )
            except ApiError as error:
                if error.status not in (429, 503):
                    raise
                wait_s = min(MAX_WAIT_S, error.retry_after_s or BUDGET_WAIT_S)
                self._closed_until = asyncio.get_running_loop().time() + wait_s
                raise _Refused from error

    async def _wait_until_open(self) -> None:
        while not self._is_draining and (seconds := self._closed_for_s()) > 0:
            await asyncio.sleep(seconds)

    def _closed_for_s(self) -> float:
        return self._closed_until - asyncio.get_running_loop().time()

    async def _write(self) -> None:
        """Keep results, some at a time, until it is over."""
        over = asyncio.create_task(self._is_over.wait())
        try:
            while not (self._is_over.is_set() and self._unwritten.empty()):
                await asyncio.wait({over}, timeout=WRITE_S)
                found = [self._unwritten.get_nowait() for _ in range(self._unwritten.qsize())]
                if found:
                    await self._keep(found)
        finally:
            over.cancel()


def _answered(line: Line, request_id: str, body: dict[str, Any]) -> Result:
    usage = body["usage"]
    # A response has other words for it.
    prompt, completion = (
        ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    )
    return Result(
        line=line.number,
        is_error=False,
        output=lines.answer_line(line.custom_id, request_id, 200, body),
        prompt_tokens=usage[f"{prompt}_tokens"],
        cached_tokens=usage[f"{prompt}_tokens_details"]["cached_tokens"],
        completion_tokens=usage[f"{completion}_tokens"],
    )


def _is_passing(error: ApiError) -> bool:
    """Whether it is worth another attempt."""
    return error.status in (429, 500, 503) and not isinstance(error, GivenUp)
