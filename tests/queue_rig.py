"""The queue's scripts against a real Redis, in a pool of their own: gateway, worker and reaper."""

from __future__ import annotations

import dataclasses
import itertools
import time
import uuid
from typing import Any

import redis

from contract.messages import protocol
from contract.messages.protocol import AdapterRef, DoneRecord, GenerateJob, Heartbeat, TokenEvent
from contract.queue import fair_queue, scripts
from controlplane.usage.limits.admit import (
    ADMIT,
    Admitted,
    Limits,
    Refusal,
    admit_args,
    read_verdict,
)

BASE = "base"
NO_LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class Taken:
    entry_id: bytes
    job: GenerateJob
    lease: int
    attempt: int


class QueueRig:
    """Plays gateways and workers with the same scripts that they run."""

    def __init__(self, redis_url: str, *, pool: str = "", base: str = BASE) -> None:
        self.url = redis_url
        self.pool = pool or uuid.uuid4().hex[:8]
        self.client: Any = redis.Redis.from_url(redis_url, protocol=2)
        self.queue = fair_queue.queue_key(self.pool, base)
        self._numbers = itertools.count()
        self._sha = {
            "admit": self.client.script_load(ADMIT),
            "pull": self.client.script_load(scripts.load("pull")),
            "publish": self.client.script_load(scripts.load("publish")),
        }

    def job(self, tenant: str = "t", *, digest: str = "", batch: bool = False) -> GenerateJob:
        refs = [AdapterRef(digest=digest, config_key="", tensors_key="", num_bytes=1)]
        return GenerateJob(
            request_id=f"req_{next(self._numbers):08}",
            tenant_id=tenant,
            api_key_id=str(uuid.uuid4()),
            gateway_id=f"g-{self.pool}",
            model="m",
            base_model=BASE,
            adapters=tuple(refs if digest else ()),
            text="x",
            is_batch=batch,
            created_at=time.time(),
            deadline=time.time() + 600,
        )

    def admit(
        self,
        job: GenerateJob,
        limits: Limits = NO_LIMITS,
        *,
        prompt: int = 10,
        output: int = 10,
        speed: float = 0,
        patience: float = 60,
        most: int = 10**6,
    ) -> Admitted | Refusal:
        class_ = fair_queue.BATCH if job.is_batch else fair_queue.INTERACTIVE
        args = [
            *(self.pool, self.queue, job.request_id, job.encode(), job.tenant_id, class_),
            *(",".join(ref.digest for ref in job.adapters), job.deadline, 3600, job.gateway_id),
            *(prompt, output, output, speed, patience, most, 10**5),
            *admit_args(limits, self.pool, job.tenant_id),
        ]
        key = protocol.job_key(self.pool, job.request_id)
        reply = self.client.evalsha(self._sha["admit"], 1, key, *args)
        return read_verdict(reply, limits)

    def accept(self, tenant: str = "t", *, digest: str = "", **options: Any) -> str:
        """Admit a job that must be let in. -> its id."""
        job = self.job(tenant, digest=digest, batch=options.pop("batch", False))
        verdict = self.admit(job, **options)
        assert isinstance(verdict, Admitted), verdict
        return job.request_id

    def beat(self, worker: str, *, silent_s: float = 0.0) -> None:
        """Be alive, or have been until `silent_s` ago."""
        now = self.client.time()[0]
        self.client.zadd(protocol.workers_key(self.pool), {worker: now - silent_s})
        heartbeat = Heartbeat(
            worker_id=worker,
            boot_id="boot",
            pool=self.pool,
            base_model=BASE,
            base_revision="r",
            device="cpu",
        )
        self.client.hset(protocol.worker_key(self.pool, worker), "m", heartbeat.encode())

    def pull(self, worker: str = "w", count: int = 1, *, boot: str = "boot") -> list[Taken]:
        keys = [
            self.queue,
            protocol.inbox_key(self.pool, worker),
            fair_queue.residents_key(self.pool, worker),
        ]
        reply = self.client.evalsha(
            self._sha["pull"], 3, *keys, self.pool, worker, boot, count, protocol.INBOX_GROUP
        )
        return [
            Taken(entry_id, GenerateJob.decode(payload), lease, attempt)
            for entry_id, payload, lease, attempt, _ in reply
        ]

    def publish(
        self,
        taken: Taken,
        *,
        worker: str = "w",
        seq: int = 0,
        prompt: int = 10,
        output: int = 10,
        ends: bool = True,
    ) -> bool:
        """Tell of a request's tokens, as its last news or not. -> whether it was taken."""
        job = taken.job
        event = TokenEvent(
            request_id=job.request_id,
            lease=taken.lease,
            seq=seq,
            text="x",
            finish_reason="stop" if ends else None,
        )
        done = DoneRecord(
            request_id=job.request_id,
            tenant_id=job.tenant_id,
            api_key_id=job.api_key_id,
            worker_id=worker,
            lease=taken.lease,
            model=job.model,
            base_model=job.base_model,
            adapter_version_id=None,
            digests=(),
            finish_reason="stop",
            error_code=None,
            prompt_tokens=prompt,
            cached_tokens=0,
            completion_tokens=output,
            created_at=job.created_at,
            queue_ms=0.0,
            load_ms=0.0,
            first_token_ms=None,
            total_ms=0.0,
        )
        keys = [
            protocol.out_key(job.gateway_id),
            protocol.done_key(self.pool),
            protocol.inbox_key(self.pool, worker),
            protocol.job_key(self.pool, job.request_id),
        ]
        args = [
            *(protocol.INBOX_GROUP, 1000, 600, 600, taken.lease, seq, event.encode(), output),
            *(prompt, 0, done.encode() if ends else b"", taken.entry_id),
        ]
        return self.client.evalsha(self._sha["publish"], 4, *keys, *args) == []

    def done(self) -> list[DoneRecord]:
        entries = self.client.xrange(protocol.done_key(self.pool))
        return [DoneRecord.decode(fields[b"m"]) for _, fields in entries]

    def state(self, request_id: str) -> dict[bytes, bytes]:
        return dict(self.client.hgetall(protocol.job_key(self.pool, request_id)))

    def close(self) -> None:
        self.client.close()
