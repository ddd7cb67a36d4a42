"""Take over the requests of dead workers. Every gateway and accountant runs a reaper.

A request without delivered tokens goes back to the front of its queue; one that was partly
delivered, cancelled or given up ends here. Each step is one script that checks that the worker is
still dead and fences it with a new lease. So two reapers, or a reaper and a worker that wakes, are
safe beside each other; they take turns only to save work.

Silence counts from when the reapers began to watch. Nobody watches while Redis is away: when it is
back, the workers have the full time to send a heartbeat.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from contract.messages import protocol
from contract.messages.protocol import (
    DoneRecord,
    ErrorCode,
    FinishReason,
    GenerateJob,
    TokenEvent,
    Usage,
)
from contract.queue import fair_queue, reply_streams, scripts
from controlplane.infra.metrics import REAPED
from controlplane.infra.redis_client import CountingRetry
from controlplane.queue.forgetting import file_rewrite_if_due
from controlplane.queue.workers import WorkerStatus, read_statuses

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
BATCH = 64
#: Not a worker's name: it takes what no worker will ever pull.
REAPER = "~reaper"


@dataclasses.dataclass(frozen=True, slots=True)
class _Seized:
    lease: int
    attempt: int
    emitted: int
    prompt_tokens: int
    cached_tokens: int
    is_cancelled: bool


class Reaper:
    """The reaper of one pool. After a redis.exceptions.RedisError, call `turn` again."""

    def __init__(self, redis_url: str, pool: str) -> None:
        self._redis: Any = redis.Redis.from_url(
            redis_url,
            protocol=2,
            socket_connect_timeout=5,
            socket_timeout=5,
            retry=CountingRetry(ExponentialBackoff(cap=0.5, base=0.05), 3),
        )
        self._pool = pool
        self._watch = f"reap:{{{pool}}}"
        self._workers = protocol.workers_key(pool)
        self._inboxes = fair_queue.inboxes_key(pool)
        self._seize = self._redis.register_script(scripts.load("seize"))
        self._publish = self._redis.register_script(scripts.load("publish"))
        self._pull = self._redis.register_script(scripts.load("pull"))
        self._forget = self._redis.register_script(scripts.load("forget_worker"))
        self._look = self._redis.register_script(scripts.load("reaper_turn"))
        self._next_turn = 0.0
        self._lost: set[bytes] = set()

    def close(self) -> None:
        self._redis.close()

    def turn_if_due(self) -> None:
        """Take a turn if the last is long enough ago and Redis answers."""
        if time.monotonic() < self._next_turn:
            return
        self._next_turn = time.monotonic() + INTERVAL_S
        try:
            self.turn()
        except (RedisError, OSError) as error:
            log.warning("nothing is reaped while Redis is away: %r", error)

    def turn(self) -> None:
        """Take over the requests of dead workers, and have Redis's file rewritten if due."""
        args = [INTERVAL_S * 0.9, protocol.MAX_UNWATCHED_S]
        if not (looked := self._look(keys=[self._watch], args=args)):
            return
        time, since = (int(looked[0]), int(looked[1])), float(looked[2])
        now = time[0] + time[1] / 1e6
        scores = dict(self._redis.zrange(self._workers, 0, -1, withscores=True))
        dead = [
            name
            for name in self._redis.smembers(self._inboxes).union(scores)
            if now - max(since, scores.get(name, 0.0)) >= protocol.HEARTBEAT_TIMEOUT_S
        ]
        self._tell_lost(scores.keys() & dead)
        for name in dead:
            self._reap(name.decode())
        heartbeats = [
            self._redis.hget(protocol.worker_key(self._pool, name.decode()), protocol.PAYLOAD_FIELD)
            for name in scores
        ]
        statuses = read_statuses(time, scores.items(), heartbeats)
        self._end_unserved(now, statuses, is_new=now - since < protocol.WORKER_GRACE_S)
        file_rewrite_if_due(self._redis)

    def _tell_lost(self, lost: set[bytes]) -> None:
        """Log the workers that were not lost at the last turn."""
        for name in lost - self._lost:
            log.warning("worker lost", extra={"worker_id": name.decode(), "pool": self._pool})
        self._lost = lost

    def _reap(self, worker_id: str) -> None:
        inbox = protocol.inbox_key(self._pool, worker_id)
        after = "-"
        while entries := self._redis.xrange(inbox, after, count=BATCH):
            for entry_id, fields in entries:
                if not self._take_over(worker_id, inbox, entry_id, fields):
                    return
            after = f"({entries[-1][0].decode()}"
        worker = protocol.worker_key(self._pool, worker_id)
        control = protocol.control_key(self._pool, worker_id)
        keys = [inbox, self._inboxes, self._workers, worker, control]
        self._forget(keys=keys, args=[worker_id])

    def _take_over(
        self, worker_id: str, inbox: str, entry_id: bytes, fields: dict[bytes, bytes]
    ) -> bool:
        """Requeue or end one request. -> False when its worker lives after all."""
        job = self._read(inbox, entry_id, fields.get(protocol.PAYLOAD_FIELD, b""))
        if job is None:
            return True
        verdict, *counts = self._seize(
            keys=[protocol.job_key(self._pool, job.request_id), inbox, self._workers],
            args=[
                *(self._pool, worker_id, protocol.HEARTBEAT_TIMEOUT_S, entry_id),
                *(protocol.INBOX_GROUP, protocol.MAX_ATTEMPTS),
            ],
        )
        if verdict == b"alive":
            return False
        log.warning(
            "a lost worker's request was taken over",
            extra={
                "request_id": job.request_id,
                "client_request_id": job.client_request_id,
                "tenant_id": job.tenant_id,
                "worker_id": worker_id,
                "verdict": verdict.decode(),
            },
        )
        REAPED.labels(verdict.decode()).inc()
        if verdict == b"end":
            lease, attempt, emitted, prompt, cached, cancel = map(int, counts)
            seized = _Seized(lease, attempt, emitted, prompt, cached, bool(cancel))
            self._end(job, worker_id, entry_id, seized)
        return True

    def _read(self, inbox: str, entry_id: bytes, payload: bytes) -> GenerateJob | None:
        """Return the job of an inbox entry; make an entry that is none a dead letter -> None."""
        try:
            return GenerateJob.decode(payload)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.error("an entry of %s is no job: %r", inbox, error)
            pipe = self._redis.pipeline()
            pipe.xadd(
                protocol.dead_letter_key(self._pool),
                {protocol.PAYLOAD_FIELD: payload, b"source": inbox, b"reason": repr(error)[:500]},
                maxlen=protocol.DEAD_LETTER_MAX_LEN,
            )
            pipe.xack(inbox, protocol.INBOX_GROUP, entry_id)
            pipe.xdel(inbox, entry_id)
            pipe.execute()
            return None

    def _end(self, job: GenerateJob, worker_id: str, entry_id: bytes, seized: _Seized) -> None:
        event, done = _final_event(job, worker_id, seized, time.time())
        ttl_s = reply_streams.out_ttl_s(job.gateway_id)
        self._publish(
            keys=[
                protocol.out_key(job.gateway_id),
                protocol.done_key(self._pool),
                protocol.inbox_key(self._pool, worker_id),
                protocol.job_key(self._pool, job.request_id),
            ],
            args=[
                *(protocol.INBOX_GROUP, protocol.OUT_STREAM_MAX_LEN, ttl_s),
                *(protocol.DONE_JOB_TTL_S, seized.lease, 0, event.encode(), seized.emitted),
                *(seized.prompt_tokens, seized.cached_tokens, done.encode(), entry_id),
            ],
        )

    def _end_unserved(self, now: float, workers: list[WorkerStatus], *, is_new: bool) -> None:
        """End the requests for a base model that no worker has served for a while.

        Remembered is when, since a worker that leaves on purpose takes its heartbeat with it. After
        a stop of the whole installation the workers get that while again.

        is_new  nobody has watched for that while yet
        """
        served = fair_queue.served_key(self._pool)
        for worker in workers:
            queue = fair_queue.queue_key(self._pool, worker.heartbeat.base_model)
            self._redis.zadd(served, {queue: now - worker.silent_s}, gt=True)
        waiting = self._redis.smembers(fair_queue.queues_key(self._pool))
        if waiting:
            self._redis.zadd(served, dict.fromkeys(waiting, now), nx=True)
        if is_new:
            return
        long_ago = self._redis.zrangebyscore(served, "-inf", now - protocol.WORKER_GRACE_S)
        for queue in waiting.intersection(long_ago):
            self._end_queue(queue.decode())

    def _end_queue(self, queue: str) -> None:
        keys = [queue, protocol.inbox_key(self._pool, REAPER), "-"]
        args: list[str | int] = [
            self._pool,
            REAPER,
            "reaper",
            fair_queue.PULL_COUNT,
            protocol.INBOX_GROUP,
        ]
        while pulled := self._pull(keys=keys, args=args):
            for entry_id, payload, lease, attempt, cancel in pulled:
                if job := self._read(keys[1], entry_id, payload):
                    seized = _Seized(lease, attempt, 0, 0, 0, bool(cancel))
                    self._end(job, REAPER, entry_id, seized)
                    REAPED.labels("unserved").inc()
        self._redis.zrem(queue + fair_queue.IDLE, REAPER)


def _final_event(
    job: GenerateJob, worker_id: str, seized: _Seized, now: float
) -> tuple[TokenEvent, DoneRecord]:
    """Return the last event of a request that nobody runs any more, and its record."""
    code: str | None = None
    message = None
    reason = FinishReason.CANCELLED
    if not seized.is_cancelled:
        reason = FinishReason.ERROR
        code, message = ErrorCode.WORKER_LOST, "The worker that ran this request was lost."
        if seized.attempt > protocol.MAX_ATTEMPTS:
            code, message = ErrorCode.GIVEN_UP, "This request ended the workers that ran it."
    usage = Usage(
        prompt_tokens=seized.prompt_tokens,
        cached_tokens=seized.cached_tokens,
        completion_tokens=seized.emitted,
    )
    event = TokenEvent(
        request_id=job.request_id,
        lease=seized.lease,
        seq=0,
        finish_reason=reason,
        error_code=code,
        error_message=message,
        usage=usage,
    )
    total_ms = max(0.0, (now - job.created_at) * 1000)
    done = DoneRecord.of(
        job,
        worker_id=worker_id,
        lease=seized.lease,
        attempts=seized.attempt,
        finish_reason=reason,
        error_code=code,
        prompt_tokens=seized.prompt_tokens,
        cached_tokens=seized.cached_tokens,
        completion_tokens=seized.emitted,
        queue_ms=total_ms,
        load_ms=0.0,
        first_token_ms=None,
        total_ms=total_ms,
    )
    return event, done
