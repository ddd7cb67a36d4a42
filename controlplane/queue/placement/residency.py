"""The adapters that the pool's workers have, and prefetches that bring them before requests do.

A heartbeat lists them; a message on the worker's control stream asks for one (`Control.PREFETCH`).
Workers of old versions ignore the message: they count as not ready, and nobody waits for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import F

from contract.messages import protocol
from contract.messages.protocol import Control, ControlMessage, Tier
from controlplane.adapters.models import AdapterVersion
from controlplane.adapters.resolution import adapter_ref
from controlplane.aliases.contents import Part, contents_of
from controlplane.aliases.models import Alias
from controlplane.aliases.services import revision_before, revision_get
from controlplane.errors import Unavailable
from controlplane.infra.redis_client import redis_client
from controlplane.queue.workers import WorkerStatus, has_copies, precisions, read_workers, workers
from controlplane.tenancy.model_scope import may_name

log = logging.getLogger(__name__)

POLL_S = 0.1
#: Number of calls that wait at a time, of one process and of one tenant; others do not wait.
MAX_WAITS, MAX_WAITS_OF_TENANT = 8, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetched:
    """The number of workers that serve the base model, and of those that have the adapter."""

    workers: int
    ready: int


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place of a version in one worker.

    worker     a name that says nothing of the worker, and is another one for each tenant
    is_pinned  whether it stays there while nobody asks for it
    silent_s   since the worker said so
    """

    worker: str
    tier: Tier
    is_pinned: bool
    silent_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Residency:
    """The places of a version in all workers of its base model.

    precisions  those in which these workers answer, as `controlplane.queue.workers` tells them
    """

    version: AdapterVersion
    places: list[Place]
    precisions: list[dict[str, str]]

    @property
    def has_copies(self) -> bool:
        """Return whether these workers keep adapters in FP8."""
        return has_copies(self.precisions)

    @property
    def max_nats(self) -> float:
        """Return by how many nats a copy in FP8 may be off, see `AdapterVersion.copy_nats`."""
        return settings.COPY_MAX_NATS

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of workers by tier; "cold" are those that do not have it."""
        found = Counter(place.tier for place in self.places)
        return {said(tier): found[tier] for tier in Tier}

    @property
    def num_pinned(self) -> int:
        return sum(place.is_pinned for place in self.places)


def said(tier: Tier) -> str:
    """Return what people are told."""
    return "cold" if tier is Tier.STORE else tier.value


def residency(versions: Sequence[AdapterVersion]) -> list[Residency]:
    """Return where the workers have versions of one adapter, as of their last heartbeats.

    Raises Unavailable without Redis.
    """
    if not versions:
        return []
    alive = _of_base(workers(), versions[0].adapter.base_model.name)
    digests = [version.digest for version in versions]
    tiers = [status.heartbeat.tiers_of(digests) for status in alive]
    told = precisions(status.heartbeat for status in alive)
    return [
        Residency(
            version,
            [
                _place(version, status, of_worker[version.digest])
                for status, of_worker in zip(alive, tiers, strict=True)
            ],
            told,
        )
        for version in versions
    ]


def _place(version: AdapterVersion, status: WorkerStatus, tier: Tier) -> Place:
    beat = status.heartbeat
    return Place(
        worker=_opaque(version, beat.worker_id),
        tier=tier,
        is_pinned=tier is Tier.GPU and version.digest in beat.pinned_digests,
        silent_s=round(status.silent_s, 1),
    )


def _opaque(version: AdapterVersion, worker_id: str) -> str:
    named = f"worker {version.tenant_id} {settings.POOL} {worker_id}".encode()
    return f"w-{hmac.digest(settings.SECRET_KEY.encode(), named, hashlib.sha256).hex()[:12]}"


def _of_base(statuses: Iterable[WorkerStatus], base_model: str) -> list[WorkerStatus]:
    """Return the workers that answer requests for the base model, in the order of their ids."""
    alive = [
        status
        for status in statuses
        if status.is_ready
        and not status.heartbeat.draining
        and status.heartbeat.base_model == base_model
    ]
    return sorted(alive, key=lambda status: status.heartbeat.worker_id)


def prefetch(
    versions: Iterable[AdapterVersion], *, tier: Tier = Tier.GPU, pin_s: float = 0.0
) -> None:
    """Ask all workers of the versions' base models to load them; return at once.

    pin_s  how long they stay on the GPU also while nobody asks for them
    Raises Unavailable without Redis.
    """
    with redis_client() as client:
        statuses = read_workers(client)
        for version in versions:
            alive = _of_base(statuses, version.adapter.base_model.name)
            send_prefetch(client, version, alive, tier=tier, pin_s=pin_s)


def send_prefetch(
    client: Any,
    version: AdapterVersion,
    statuses: Iterable[WorkerStatus],
    *,
    tier: Tier,
    pin_s: float = 0.0,
) -> None:
    """Ask these workers to load a version."""
    message = ControlMessage(
        action=Control.PREFETCH,
        adapter=adapter_ref(version),
        tier=tier.value,
        tenant_id=str(version.tenant_id),
        pin_s=pin_s,
    )
    fields = {protocol.PAYLOAD_FIELD: message.encode()}
    for status in statuses:
        control = protocol.control_key(settings.POOL, status.heartbeat.worker_id)
        client.xadd(control, fields, maxlen=protocol.CONTROL_STREAM_MAX_LEN)


def before_switch(version: AdapterVersion | None) -> Prefetched | None:
    """Have the workers load a version that is about to become live: see `prefetched`.

    Returns None for one that cannot, or is so already. Call it outside of transactions.
    """
    if version is None or version.status != AdapterVersion.Status.READY:
        return None
    if version.adapter.live_version_id == version.pk:
        return None
    return prefetched([version])


def before_alias_switch(parts: Iterable[Part]) -> Prefetched | None:
    """Have the workers load what an alias's next revision names: see `prefetched`.

    Returns None if nothing that it names is ready, or may be named by the caller; storing the
    revision says why. Call it outside
    of transactions, in the tenant's scope.
    """
    return _prefetched_parts(part for part in parts if may_name(part.model))


def _prefetched_parts(parts: Iterable[Part]) -> Prefetched | None:
    found = _ready(parts)
    if len({version.adapter.base_model_id for version in found}) != 1:
        return None
    return prefetched(found)


def before_alias_rollback(alias: Alias, number: int | None) -> Prefetched | None:
    """Have the workers load what an alias goes back to: revision `number`, or the one before.

    Raises NotFound, Conflict, as the rollback does.
    """
    revision = revision_get(alias=alias, number=number)
    if number is None:
        revision = revision_before(revision)
    return before_alias_switch(contents_of(revision).parts)


def before_canary(alias: Alias) -> Prefetched | None:
    """Have the workers load an alias's canary, which is about to get more requests."""
    return _prefetched_parts(contents_of(revision_get(alias=alias)).canary)


def _ready(parts: Iterable[Part]) -> list[AdapterVersion]:
    """Return the ready versions that the parts of targets mean."""
    ready = AdapterVersion.objects.filter(status=AdapterVersion.Status.READY)
    rows = ready.select_related("adapter__base_model")
    found: list[AdapterVersion] = []
    for part in parts:
        of_adapter = rows.filter(adapter__name=part.adapter)
        if part.version is None:
            of_adapter = of_adapter.filter(adapter__live_version=F("pk"))
        else:
            of_adapter = of_adapter.filter(number=part.version)
        found += of_adapter
    return found


def on_switch(version: AdapterVersion) -> None:
    """Have the workers hold a version that has just become live, whatever the cause."""
    _hold([version])


def on_ramp_step(parts: Sequence[Part]) -> None:
    """Have the workers hold what an alias names after a step of its ramp."""
    _hold(_ready(parts))


def _hold(versions: Sequence[AdapterVersion]) -> None:
    try:
        prefetch(versions, tier=Tier.HOST)
    except Unavailable as error:
        log.warning("live versions could not be prefetched: %s", error.message)


def prefetched(versions: Sequence[AdapterVersion], *, timeout_s: float | None = None) -> Prefetched:
    """Have all workers of the versions' base model load them onto their GPUs, and wait for that.

    versions   ready ones of one tenant and one base model, such as an alias's targets

    timeout_s  None: LORIKEET_PREFETCH_WAIT_S

    Returns after that time all the same, and at once without workers, without Redis, inside a
    transaction, or when many others wait already: whoever switches to them then does so without. A
    worker that starts in that time counts too.
    """
    if timeout_s is None:
        timeout_s = settings.PREFETCH_WAIT_S
    if connection.in_atomic_block:
        return _prefetched(versions, 0.0)  # its locks would last as long
    with _Wait(str(versions[0].tenant_id)) as wait:
        return _prefetched(versions, timeout_s if wait.is_allowed else 0.0)


def _prefetched(versions: Sequence[AdapterVersion], timeout_s: float) -> Prefetched:
    base_model = versions[0].adapter.base_model.name
    end = time.monotonic() + timeout_s
    asked: set[tuple[str, str, str]] = set()  # digest, worker, its run
    found = Prefetched(0, 0)
    try:
        with redis_client() as client:
            while True:
                alive = _of_base(read_workers(client), base_model)
                lacking: set[str] = set()
                able = {s.heartbeat.worker_id for s in alive if _can_prefetch(s)}
                for version in versions:
                    cold = [s for s in alive if s.heartbeat.tier_of(version.digest) != Tier.GPU]
                    lacking |= {status.heartbeat.worker_id for status in cold}
                    new = [status for status in cold if _run_of(version, status) not in asked]
                    send_prefetch(client, version, new, tier=Tier.GPU)
                    asked |= {_run_of(version, status) for status in new}
                found = Prefetched(len(alive), len(alive) - len(lacking))
                if not lacking & able or time.monotonic() >= end:
                    return found
                if not connection.in_atomic_block:
                    connection.close()  # others need it; the next query takes a new one
                time.sleep(POLL_S)
    except Unavailable as error:
        log.warning("versions could not be prefetched: %s", error.message)
        return found


def _can_prefetch(status: WorkerStatus) -> bool:
    return Control.PREFETCH in status.heartbeat.controls


def _run_of(version: AdapterVersion, status: WorkerStatus) -> tuple[str, str, str]:
    return version.digest, status.heartbeat.worker_id, status.heartbeat.boot_id


class _Wait:
    """One call that waits in this process; `is_allowed` says whether it may."""

    _lock = threading.Lock()
    _waiting: Counter[str] = Counter()

    def __init__(self, tenant_id: str) -> None:
        self._tenant_id = tenant_id
        self.is_allowed = False

    def __enter__(self) -> _Wait:
        with self._lock:
            self.is_allowed = (
                self._waiting.total() < MAX_WAITS
                and self._waiting[self._tenant_id] < MAX_WAITS_OF_TENANT
            )
            if self.is_allowed:
                self._waiting[self._tenant_id] += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self.is_allowed:
                self._waiting[self._tenant_id] -= 1
                if not self._waiting[self._tenant_id]:
                    del self._waiting[self._tenant_id]
