"""Keep adapters where their tenants want them while nobody asks: a periodic task.

    pinned  on every worker's GPU; nothing evicts it there
    warm    in every worker's host memory at least

Both are kept by asking again: each turn asks workers for what they do not have, so a worker that
was restarted has it again soon; a pin ends by itself when nobody asks any more. Workers bound what
they do of it, by tenant and in all: see `worker.serving.prefetches`, and EngineConfig's
`adapter_pin_share`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from django.conf import settings
from prometheus_client.core import Metric

from contract.messages.protocol import Tier
from controlplane.adapters.models import AdapterVersion
from controlplane.aliases.models import AliasPart, AliasRevision, is_current
from controlplane.aliases.resolution import version_of
from controlplane.infra.metrics import gauge
from controlplane.infra.redis_client import redis_client
from controlplane.queue.placement.residency import send_prefetch
from controlplane.queue.workers import WorkerStatus, read_workers, workers
from controlplane.tenancy.scoping import all_tenants

log = logging.getLogger(__name__)

PINNED, WARM = AliasRevision.Warmth.PINNED.value, AliasRevision.Warmth.WARM.value
#: Versions that one tenant may have kept in each way; the others are cold.
MAX_OF_TENANT = {PINNED: 4, WARM: 16}
#: Number of turns that a pin lasts.
_PIN_TURNS = 6
#: Number of messages to one worker in a turn; the next turn sends the following ones.
MAX_MESSAGES = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A ready version, with its adapter and base model, and how it is to be kept."""

    version: AdapterVersion
    warmth: str


#: Parts of aliases that a turn looks at.
_MAX_PARTS = 10_000


def of_aliases() -> Iterable[Wanted]:
    """Return what the current revisions of aliases name, if they are to be kept warm."""
    kept = AliasPart.objects.filter(is_current("revision__"), revision__warmth__in=MAX_OF_TENANT)
    rows = kept.select_related(
        "revision", "version", "adapter__base_model", "adapter__live_version"
    ).defer("revision__json_schema", "revision__system_prompt")
    for part in rows.order_by("pk")[:_MAX_PARTS]:
        version = version_of(part)
        if version is not None:
            yield Wanted(version, part.revision.warmth)


def wanted() -> list[Wanted]:
    """Return what is to be kept: first one of each tenant, then a second one, and so on."""
    with all_tenants(reason="adapters of all tenants are kept warm"):
        found = list(of_aliases())
    found.sort(key=lambda item: (item.warmth != PINNED, str(item.version.pk)))
    turns: dict[int, list[Wanted]] = {}
    seen: set[tuple[uuid.UUID, str]] = set()
    counts: Counter[tuple[uuid.UUID, str]] = Counter()
    for item in found:
        tenant_id, digest = item.version.tenant_id, item.version.digest
        key = (tenant_id, item.warmth)
        if (tenant_id, digest) in seen or counts[key] >= MAX_OF_TENANT[item.warmth]:
            continue
        seen.add((tenant_id, digest))
        turns.setdefault(counts[key], []).append(item)
        counts[key] += 1
    return list(itertools.chain.from_iterable(turns[turn] for turn in sorted(turns)))


def warmth_keep() -> int:
    """Ask the workers for what they lack. -> how many messages. Raises Unavailable."""
    kept = wanted()
    if not kept:
        return 0
    with redis_client() as client:
        alive = [status for status in read_workers(client) if status.is_ready]
        turn = int(time.time() / max(settings.WARMTH_TURN_S, 1))
        return sum(_keep(client, status, kept, turn) for status in alive)


def pin_lease_s() -> float:
    """Return for how long workers keep what is pinned, unless they are asked again."""
    return float(settings.WARMTH_TURN_S * _PIN_TURNS)


def _keep(client: Any, status: WorkerStatus, kept: Sequence[Wanted], turn: int) -> int:
    beat = status.heartbeat
    if beat.draining:
        return 0
    tiers = beat.tiers_of(item.version.digest for item in kept)
    lacking = [
        item
        for item in kept
        if item.version.adapter.base_model.name == beat.base_model
        and (item.warmth == PINNED or tiers[item.version.digest].rank > Tier.HOST.rank)
    ]
    if len(lacking) > MAX_MESSAGES:
        log.warning("a worker is asked for %d of %d adapters", MAX_MESSAGES, len(lacking))
        # Pins are asked for in each turn, so those before them may never end.
        first = (turn * MAX_MESSAGES) % len(lacking)
        lacking = [*lacking[first:], *lacking[:first]][:MAX_MESSAGES]
    for item in lacking:
        tier, pin_s = (Tier.GPU, pin_lease_s()) if item.warmth == PINNED else (Tier.HOST, 0.0)
        send_prefetch(client, item.version, [status], tier=tier, pin_s=pin_s)
    return len(lacking)


def kept_warm() -> Iterable[Metric]:
    """Return how many adapters are to be kept, times the workers that should have them."""
    statuses = [status for status in workers() if status.is_ready]
    counts: Counter[tuple[str, str]] = Counter(
        dict.fromkeys(itertools.product((PINNED, WARM), ("ready", "missing")), 0)
    )
    kept = wanted()
    for status in statuses:
        beat = status.heartbeat
        tiers, pinned = beat.tiers_of(item.version.digest for item in kept), beat.pinned_digests
        for item in kept:
            if beat.base_model != item.version.adapter.base_model.name:
                continue
            is_there = tiers[item.version.digest].rank <= Tier.HOST.rank
            if item.warmth == PINNED:
                is_there = tiers[item.version.digest] is Tier.GPU and item.version.digest in pinned
            counts[item.warmth, "ready" if is_there else "missing"] += 1
    about = "Adapters that are kept warm, counted once for each worker that should have them."
    values: list[Any] = [(key, float(count)) for key, count in counts.items()]
    return [gauge("lorikeet_kept_adapters", about, values, "warmth", "state")]
