"""The replies that a gateway waits for: their events, their losses, and who has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from contract.messages import protocol
from contract.messages.protocol import ErrorCode, GenerateJob, TokenEvent
from controlplane.errors import ApiError, Unavailable
from controlplane.queue.batch_reply_stream import BatchReplyStream
from controlplane.queue.known_workers import KnownWorkers
from controlplane.queue.replies import Reply
from controlplane.requestlog.recorder import Recorder

#: A request without news for this long is looked up in Redis.
SILENCE_S = 5.0


class OpenReplies:
    """Owns the replies that nobody has left yet, by request id.

    client  of redis.asyncio
    cancel  cancels a request in the queue
    """

    def __init__(
        self,
        client: Any,
        pool: str,
        workers: KnownWorkers,
        recorder: Recorder,
        cancel: Callable[[str], Any],
    ) -> None:
        self._redis = client
        self._pool = pool
        self._workers = workers
        self._recorder = recorder
        self._cancel = cancel
        self._replies: dict[str, Reply] = {}

    def __len__(self) -> int:
        return len(self._replies)

    def expect(self, job: GenerateJob, batch_stream: BatchReplyStream | None) -> Reply:
        """Make the job's reply, with the events so far; later ones are delivered to it."""
        reply = self._replies[job.request_id] = Reply(job, self._recorder.open(job))
        for event in batch_stream.news(job.request_id) if batch_stream is not None else ():
            self.deliver(event)
        return reply

    def drop(self, reply: Reply) -> None:
        """Forget the reply of a request that was not accepted."""
        del self._replies[reply.request_id]

    def leave(self, reply: Reply) -> None:
        """Forget a reply; cancel it if it has not ended and nobody but its client reads it."""
        if self._replies.get(reply.request_id) is not reply:
            return  # left already, or another reply waits for the request now
        del self._replies[reply.request_id]
        if not reply.is_ended and not reply.goes_on:
            reply.abandon()
            self._cancel(reply.request_id)

    def deliver(self, event: TokenEvent) -> None:
        """Hand an event to the request it belongs to."""
        reply = self._replies.get(event.request_id)
        if reply is None:
            return  # its client has left
        try:
            reply.push(event)
        except ApiError as error:
            self._give_up(reply, error)

    def _give_up(self, reply: Reply, error: ApiError) -> None:
        if not reply.is_forgotten:  # it would end the request that is sent in its place
            self._cancel(reply.request_id)
        reply.fail(error)

    async def find_lost(self) -> None:
        """End the replies that no event will come for: Redis lost them, or their worker did.

        The reaper ends those that only wait for a worker.
        """
        now = asyncio.get_running_loop().time()
        silent = [
            reply
            for reply in self._replies.values()
            if reply.is_accepted and not reply.is_ended and now - reply.heard_at > SILENCE_S
        ]
        if not silent:
            return
        pipe = self._redis.pipeline(transaction=False)
        for reply in silent:
            pipe.hmget(protocol.job_key(self._pool, reply.request_id), "state", "worker")
        known = self._workers.ids()
        states = await pipe.execute()
        await self._workers.refresh()  # one that took it may have come, and one may have left,
        known |= self._workers.ids()  # in the meantime
        for reply, (state, worker_id) in zip(silent, states, strict=True):
            # A finished job's last event is read within moments; still silent, it is lost.
            if state is None or (state == b"done" and now - reply.heard_at > 2 * SILENCE_S):
                lost, reply.is_forgotten = "The queue lost this request.", state is None
            elif state == b"running" and worker_id not in known:
                lost = "The worker is gone."
            else:
                continue
            self._give_up(reply, Unavailable(lost, code=ErrorCode.WORKER_LOST))
