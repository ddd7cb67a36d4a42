"""Collect the answers that exist when a batch is stopped, and cancel the rest."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator

from controlplane.errors import ApiError, Unavailable
from controlplane.files.batches import lines
from controlplane.files.batches.feeding import answered, is_passing, refused, submit_line
from controlplane.files.batches.lines import Line, Request
from controlplane.files.batches.results import Result
from controlplane.inference.service import Generation
from controlplane.queue.batch_reply_stream import BatchReplyStream
from controlplane.queue.dispatcher import get_dispatcher
from controlplane.tenants.auth import Principal

log = logging.getLogger(__name__)

#: Workers need a moment to end a cancelled request. Dead workers are not waited for.
PATIENCE_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    line: Line
    request_id: str
    request: Request
    generation: Generation


async def collect(
    found: AsyncIterator[Line],
    *,
    endpoint: str,
    principal: Principal | None,
    batch_stream: BatchReplyStream,
) -> list[Result]:
    """Return the results of the lines that end before they can be cancelled.

    found      the lines that are under way, as far as they are still known
    principal  who asks; None: their key has ended, and nothing is collected for them
    Raises Unavailable.
    """
    waiting: list[_Waiting] = []
    left = batch_stream.lines_under_way
    dispatcher = await get_dispatcher()
    try:
        async for line in found:
            if principal is None:
                break
            try:
                waiting.append(await _wait_for(line, endpoint, principal, batch_stream))
            except Unavailable:
                raise  # no fault of the line
            except ApiError as error:
                log.info("the answer of line %d cannot be read: %r", line.number, error)
        ended = {each.request_id for each in waiting if each.generation.reply.is_ended}
        running = {batch_stream.request_id(number) for number in left} - ended
        if cancelling := [dispatcher.cancel(request_id) for request_id in running]:
            await asyncio.wait(cancelling, timeout=PATIENCE_S)
        return await _results(waiting, endpoint)
    finally:
        for each in waiting:
            each.generation.leave()


async def _wait_for(
    line: Line, endpoint: str, principal: Principal, batch_stream: BatchReplyStream
) -> _Waiting:
    """Wait for a line's answer. Raises ApiError when it cannot be found out."""
    request = lines.parse_request(line, endpoint, principal.tenant.id)
    request_id = batch_stream.request_id(line.number)
    generation = await submit_line(
        principal,
        request.body,
        request_id=request_id,
        endpoint=endpoint,
        batch_stream=batch_stream,
    )
    return _Waiting(line, request_id, request, generation)


async def _results(waiting: list[_Waiting], endpoint: str) -> list[Result]:
    """Return the results that come within `PATIENCE_S`."""
    tasks = [asyncio.create_task(_result(each, endpoint)) for each in waiting]
    if not tasks:
        return []
    ended, running = await asyncio.wait(tasks, timeout=PATIENCE_S)
    for task in running:
        task.cancel()
    if running:
        log.warning("%d lines were given up", len(running))
    return [result for task in ended if (result := task.result()) is not None]


async def _result(waiting: _Waiting, endpoint: str) -> Result | None:
    """Return the result; None if the line was cancelled, or would have been tried again."""
    try:
        body = await waiting.request.answer(waiting.generation)
    except ApiError as error:
        if is_passing(error):
            return None
        return refused(waiting.line, waiting.request_id, error, endpoint)
    return answered(waiting.line, waiting.request_id, body)
