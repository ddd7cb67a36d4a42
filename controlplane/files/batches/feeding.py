"""Send a batch's lines through the queue, some at a time, each until it has an answer."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from controlplane.errors import ApiError, GivenUp, InternalError
from controlplane.files.batches import lines
from controlplane.files.batches.concurrency import Concurrency
from controlplane.files.batches.lines import Line, Request
from controlplane.files.batches.results import Result
from controlplane.inference import access
from controlplane.inference.service import Generation, SubmittedBody, submit
from controlplane.infra.web.threads import query_in_thread
from controlplane.queue.batch_reply_stream import BatchReplyStream, Fenced
from controlplane.queue.dispatcher import get_dispatcher
from controlplane.tenancy.row_lease import LeaseLost
from controlplane.tenants.auth import Principal

log = logging.getLogger(__name__)

#: Largest number of lines in memory at a time, and of their bytes.
MAX_HELD = 256
MAX_HELD_BYTES = 32 * 1024**2
#: Number of unwritten results at which lines begin to wait.
MAX_UNWRITTEN = 500
WRITE_S = 0.2
#: Number of attempts at a line whose generation fails for no fault of its own.
MAX_ATTEMPTS = 8
MAX_WAIT_S = 60.0
#: Time until the next attempt after a spent budget: it may be raised, or its period end.
BUDGET_WAIT_S = 10.0


class _Refused(Exception):
    """The request was not accepted now; it may be later."""


class _Forgotten(Exception):
    """Raised when Redis has lost the request and its answer."""


class Feeder:
    """The loop that answers lines until there are no more.

    If it is cancelled, the next runner that opens the stream finds the requests under way.

    deadline      Unix seconds; past it nobody wants the answers
    principal     who asks, with the permissions they have at that moment
    batch_stream  the batch's, opened
    keep          writes results; it is not called twice at a time
    """

    def __init__(
        self,
        *,
        batch_id: uuid.UUID,
        endpoint: str,
        deadline: float,
        principal: Callable[[], Principal],
        concurrency: Concurrency,
        batch_stream: BatchReplyStream,
        keep: Callable[[list[Result]], Awaitable[None]],
    ) -> None:
        self._batch_id = batch_id
        self._endpoint = endpoint
        self._deadline = deadline
        self._principal = principal
        self._concurrency = concurrency
        self._batch_stream = batch_stream
        self._keep = keep
        self._unwritten: asyncio.Queue[Result] = asyncio.Queue(MAX_UNWRITTEN)
        self._is_over = asyncio.Event()  # set when no more results come
        self._freed = asyncio.Event()
        self._num_held = self._bytes_held = 0
        self._submitting = asyncio.Lock()
        self._closed_until = 0.0  # event loop's time before which nothing is submitted

    async def run(self, found: AsyncIterator[Line]) -> None:
        """Answer every line and keep its result. Raises what `keep` raises, and LeaseLost."""
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
            await asyncio.wait({writing})  # answers are kept also when it stops here
        writing.result()

    async def _feed(self, found: AsyncIterator[Line]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for line in found:
                    await self._hold(line)
                    group.create_task(self._line(line))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _hold(self, line: Line) -> None:
        """Wait until the line fits into memory."""
        while self._num_held >= MAX_HELD or self._bytes_held >= MAX_HELD_BYTES:
            self._freed.clear()
            await self._freed.wait()
        self._num_held += 1
        self._bytes_held += len(line.body)

    async def _line(self, line: Line) -> None:
        try:
            await self._unwritten.put(await self._answer(line))
        finally:
            self._num_held -= 1
            self._bytes_held -= len(line.body)
            self._freed.set()

    async def _answer(self, line: Line) -> Result:
        """Return the line's result, with as many attempts as needed."""
        while True:
            request_id = self._batch_stream.request_id(line.number)
            try:
                return await self._attempt(line, request_id)
            except _Refused:
                await self._wait_until_open()
            except _Forgotten:
                self._batch_stream.send_again(line.number)
            except Fenced as error:
                raise LeaseLost from error
            except Exception as error:
                num_attempts = self._batch_stream.num_attempts(line.number)
                failure = self._told(line, error)
                if not is_passing(failure) or num_attempts >= MAX_ATTEMPTS:
                    return refused(line, request_id, failure, self._endpoint)
                self._batch_stream.try_again(line.number)
                pause_s = 2.0**num_attempts * random.uniform(0.25, 0.5)
                await asyncio.sleep(min(MAX_WAIT_S, pause_s))

    async def _attempt(self, line: Line, request_id: str) -> Result:
        """Return the result of one request, also of one that an earlier runner sent.

        Raises _Refused, _Forgotten, Fenced; ApiError and whatever else when there is no answer.
        """
        is_under_way = self._batch_stream.is_under_way(request_id)
        generation: Generation | None = None
        async with self._concurrency.place(self._batch_id, is_taken=is_under_way):
            try:
                request = lines.parse_request(line, self._endpoint, self._principal().tenant.id)
                generation = await self._submit(request, request_id)
                return answered(line, request_id, await request.answer(generation))
            except (_Refused, Fenced):
                raise
            except Exception as error:
                if generation is not None and generation.reply.is_forgotten:
                    raise _Forgotten from error
                if generation is None or not generation.reply.is_ended:
                    await self._end(request_id)
                raise
            finally:
                if generation is not None:
                    generation.leave()

    async def _end(self, request_id: str) -> None:
        """Cancel a request whose answer nobody will read."""
        if self._batch_stream.is_under_way(request_id):
            (await get_dispatcher()).cancel(request_id)

    def _told(self, line: Line, error: Exception) -> ApiError:
        """Return the error for the line's client; a defect of ours does not stop other lines."""
        if isinstance(error, ApiError):
            return error
        log.error("line %s of batch %s failed", line.number, self._batch_id, exc_info=error)
        return InternalError("The server failed on this request.")

    async def _submit(self, request: Request, request_id: str) -> Generation:
        """Submit a line. Raises _Refused for a limit, a budget, a full queue, no worker.

        One at a time, so that after a refusal the others wait without asking.
        """
        async with self._submitting:
            if self._closed_for_s() > 0 and not self._batch_stream.is_under_way(request_id):
                raise _Refused
            try:
                return await submit_line(
                    self._principal(),
                    request.body,
                    request_id=request_id,
                    endpoint=self._endpoint,
                    deadline=self._deadline,
                    batch_stream=self._batch_stream,
                )
            except ApiError as error:
                if error.status not in (429, 503):
                    raise
                wait_s = min(MAX_WAIT_S, error.retry_after_s or BUDGET_WAIT_S)
                self._closed_until = asyncio.get_running_loop().time() + wait_s
                raise _Refused from error

    async def _wait_until_open(self) -> None:
        while (seconds := self._closed_for_s()) > 0:
            await asyncio.sleep(seconds)

    def _closed_for_s(self) -> float:
        return self._closed_until - asyncio.get_running_loop().time()

    async def _write(self) -> None:
        """Write results, some at a time, until no more come."""
        over = asyncio.create_task(self._is_over.wait())
        try:
            while not (self._is_over.is_set() and self._unwritten.empty()):
                await asyncio.wait({over}, timeout=WRITE_S)
                found = [self._unwritten.get_nowait() for _ in range(self._unwritten.qsize())]
                if found:
                    await self._keep(found)
                    await self._batch_stream.settle({result.line for result in found})
        finally:
            over.cancel()


async def submit_line(
    principal: Principal,
    body: SubmittedBody,
    *,
    request_id: str,
    endpoint: str,
    batch_stream: BatchReplyStream,
    deadline: float | None = None,
) -> Generation:
    """Submit a line's body; find it by its id if it is under way: its model may be gone by now.

    Raises what `access.resolve_now` and `submit` raise.
    """
    selector = body.selector()
    try:
        caller = access.known(principal, selector)
        if caller is None:
            caller = await query_in_thread(lambda: access.resolve_now(principal, selector))
    except ApiError as error:
        base_model = batch_stream.base_model_of(request_id)
        if base_model is None or error.status >= 500:
            raise
        caller = await access.resolve_accepted(principal, selector, base_model)
    return await submit(
        caller,
        body,
        request_id=request_id,
        endpoint=endpoint,
        is_batch=True,
        deadline=deadline,
        batch_stream=batch_stream,
    )


def answered(line: Line, request_id: str, body: dict[str, Any]) -> Result:
    """Return the result of a line whose answer is `body`."""
    usage = body["usage"]
    # A response has other names for them.
    prompt, completion = (
        ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    )
    return Result(
        line=line.number,
        is_error=False,
        output=lines.answer_line(line.custom_id, request_id, 200, body),
        prompt_tokens=usage[f"{prompt}_tokens"],
        cached_tokens=usage[f"{prompt}_tokens_details"]["cached_tokens"],
        completion_tokens=usage.get(f"{completion}_tokens", 0),  # an embedding has none
        thought_tokens=usage.get(f"{completion}_tokens_details", {}).get("reasoning_tokens", 0),
    )


def refused(line: Line, request_id: str, error: ApiError, endpoint: str) -> Result:
    """Return the result of a line that has no answer."""
    output = lines.error_line(line.custom_id, request_id, error, endpoint)
    return Result(line=line.number, is_error=True, output=output)


def is_passing(error: ApiError) -> bool:
    """Return whether another attempt may succeed."""
    return error.status in (429, 500, 503) and not isinstance(error, GivenUp)
