"""Keep the system prompts of aliases computed while nobody asks: part of the task in `warmth`.

The KV of the prompt of an alias that is pinned or warm stays in the pages of each worker's engine,
for its primary and for a canary with a share. A worker that does not have it gets the text; one
that has it, as its heartbeat says, has its lease renewed; what is no longer wanted is let go.
Workers and engines bound what they keep: `worker.serving.prefix_pins`, `Engine.keep_prefixes`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from django.conf import settings
from django.db.models import CharField, Func
from prometheus_client.core import Metric

from contract.messages import protocol
from contract.messages.protocol import AdapterRef, Control, ControlMessage
from controlplane.adapters.resolution import ResolvedModel, adapter_ref
from controlplane.aliases.models import AliasRevision, is_current
from controlplane.aliases.resolution import plans_of
from controlplane.infra.metrics import gauge
from controlplane.infra.redis_client import redis_client
from controlplane.queue.dead_letters import quarantined
from controlplane.queue.placement.warmth import PINNED, WARM, pin_lease_s
from controlplane.queue.workers import WorkerStatus, read_workers, workers
from controlplane.tenancy.scoping import all_tenants

#: Prefixes that one tenant may have kept, and all.
MAX_OF_TENANT, MAX_OF_ALL = 4, 64
#: So that the texts, which may be long, stay in the database until a worker needs one.
_SHA256 = Func(
    "system_prompt",
    template="encode(sha256(convert_to(%(expressions)s, 'UTF8')), 'hex')",
    output_field=CharField(),
)
#: Aliases that a turn looks at.
_MAX_ALIASES = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """One system prompt with the adapters that read it; the text is in the revision."""

    name: str
    tenant_id: uuid.UUID
    revision_id: uuid.UUID
    base_model: str
    adapters: tuple[AdapterRef, ...]


def wanted() -> list[Prefix]:
    """Return what is to be kept: first one of each tenant, then a second one, and so on.

    Of a tenant's, those of pinned aliases come first. Adapters in quarantine are passed over: to
    compute with them may end a worker. Raises Unavailable.
    """
    banned = quarantined()
    with all_tenants(reason="system prompts of all tenants are kept computed"):
        rows = AliasRevision.objects.filter(is_current(), warmth__in=(PINNED, WARM))
        rows = rows.exclude(system_prompt="").annotate(prompt_sha256=_SHA256)
        found = list(plans_of(rows.order_by("pk")[:_MAX_ALIASES]))
    found.sort(key=lambda item: (item[0].warmth != PINNED, str(item[0].alias_id)))
    turns: dict[int, list[Prefix]] = {}
    seen: set[str] = set()
    counts: Counter[uuid.UUID] = Counter()
    for revision, plan in found:
        for model in (plan.primary, plan.canary if plan.canary_percent else None):
            if model is None or model.is_shut_down or counts[revision.tenant_id] >= MAX_OF_TENANT:
                continue
            prefix = _prefix(revision, model)
            is_banned = any(ref.digest in banned for ref in prefix.adapters)
            if prefix.name not in seen and not is_banned:
                seen.add(prefix.name)
                turns.setdefault(counts[revision.tenant_id], []).append(prefix)
                counts[revision.tenant_id] += 1
    by_turn = itertools.chain.from_iterable(turns[turn] for turn in sorted(turns))
    return list(itertools.islice(by_turn, MAX_OF_ALL))


def _prefix(revision: AliasRevision, model: ResolvedModel) -> Prefix:
    refs = tuple(adapter_ref(version, weight) for version, weight in model.parts)
    sha256: str = revision.prompt_sha256  # type: ignore[attr-defined]  # annotated
    parts = [[ref.digest, ref.weight] for ref in refs]
    told = json.dumps([str(revision.tenant_id), model.base_model.name, parts, sha256])
    return Prefix(
        name=hashlib.sha256(told.encode()).hexdigest()[:24],
        tenant_id=revision.tenant_id,
        revision_id=revision.pk,
        base_model=model.base_model.name,
        adapters=refs,
    )


def prefixes_keep() -> int:
    """Ask the workers for what they lack, renew the rest. -> how many messages.

    Raises Unavailable.
    """
    kept = wanted()
    with redis_client() as client:
        alive = [status for status in read_workers(client) if status.is_ready]
        messages = [(status, _messages(status, kept)) for status in alive]
        texts = _texts(prefix for _, of_worker in messages for prefix, has in of_worker if not has)
        num_sent = 0
        for status, of_worker in messages:
            told = [
                _message(prefix, "" if has else texts[prefix.revision_id])
                for prefix, has in of_worker
                if has or prefix.revision_id in texts  # else it was deleted a moment ago
            ]
            told += _released(status, kept)
            key = protocol.control_key(settings.POOL, status.heartbeat.worker_id)
            for message in told:
                fields = {protocol.PAYLOAD_FIELD: message.encode()}
                client.xadd(key, fields, maxlen=protocol.CONTROL_STREAM_MAX_LEN)
            num_sent += len(told)
    return num_sent


def _messages(status: WorkerStatus, kept: Sequence[Prefix]) -> list[tuple[Prefix, bool]]:
    """Return what a worker is asked for, and whether it has that."""
    beat = status.heartbeat
    if beat.draining or Control.PIN_PREFIX not in beat.controls:
        return []
    own = set(beat.kept_prefixes)
    return [(item, item.name in own) for item in kept if item.base_model == beat.base_model]


def _texts(prefixes: Iterable[Prefix]) -> dict[uuid.UUID, str]:
    ids = {prefix.revision_id for prefix in prefixes}
    if not ids:
        return {}
    with all_tenants(reason="system prompts of all tenants are kept computed"):
        rows = AliasRevision.objects.filter(pk__in=ids)
        return dict(rows.values_list("pk", "system_prompt"))


def _message(prefix: Prefix, system_prompt: str) -> ControlMessage:
    return ControlMessage(
        action=Control.PIN_PREFIX,
        prefix=prefix.name,
        tenant_id=str(prefix.tenant_id),
        adapters=prefix.adapters,
        system_prompt=system_prompt,
        pin_s=pin_lease_s(),
    )


def _released(status: WorkerStatus, kept: Sequence[Prefix]) -> list[ControlMessage]:
    """Let a worker's prefixes go that nobody wants any more."""
    names = {prefix.name for prefix in kept}
    gone = [name for name in status.heartbeat.kept_prefixes if name not in names]
    return [ControlMessage(action=Control.PIN_PREFIX, prefix=name) for name in gone]


def kept_prefixes() -> Iterable[Metric]:
    """Return how many prefixes are to be kept, times the workers that should have them."""
    counts: Counter[str] = Counter(dict.fromkeys(("ready", "missing"), 0))
    kept = wanted()
    for status in workers():
        if status.is_ready:
            for _, has in _messages(status, kept):
                counts["ready" if has else "missing"] += 1
    about = "System prompts that are kept computed, once for each worker that should have them."
    values: list[Any] = [((state,), float(count)) for state, count in counts.items()]
    return [gauge("lorikeet_kept_prefixes", about, values, "state")]
