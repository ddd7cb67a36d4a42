"""Turn a schema into the decoder's schema and a finding for every keyword."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from contract.tenant_cache import TenantCache
from controlplane.schemas import arrays, limits, logic, objects, values
from controlplane.schemas.findings import BadSchema, Finding, Status
from controlplane.schemas.instances import Instances
from controlplane.schemas.walker import Walk
from controlplane.tenancy.scope import current

HANDLERS = {**values.HANDLERS, **arrays.HANDLERS, **objects.HANDLERS, **logic.HANDLERS}
_NUM_KEPT = 256
#: Largest length of the decoder's schema: one class of characters may take thousands.
MAX_REWRITTEN_CHARS = 512 * 1024

#: Problem of a schema that cannot be used, and its place.
_Refusal = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one schema.

    schema    JSON text of the schema itself; its properties keep their order
    decoding  JSON text of the schema that the decoder gets
    findings  one for each keyword, in the order of the schema
    """

    schema: str
    decoding: str
    findings: tuple[Finding, ...]

    def with_status(self, *statuses: Status) -> list[Finding]:
        return [finding for finding in self.findings if finding.status in statuses]

    @property
    def is_enforced(self) -> bool:
        """Return whether every finished answer obeys the schema."""
        return not self.with_status(Status.CHECKED, Status.UNSUPPORTED)


def plan(schema: dict[str, Any]) -> Plan:
    """Return the plan of a schema. Raises BadSchema for one that cannot be used.

    It is cached for the tenant in scope, if there is one.
    """
    limits.check_size(schema)
    text, scope = _text(schema), current.get()
    tenant_id = str(scope) if isinstance(scope, uuid.UUID) else None
    made = None if tenant_id is None else _kept.get(tenant_id, text)
    if made is None:
        made = _made(text)
        if tenant_id is not None:
            _kept.put(tenant_id, text, made)
    if isinstance(made, Plan):
        return made
    raise BadSchema(*made)


def paths(findings: Iterable[Finding], most: int = 20, *, within: str = "") -> str:
    """Return the findings' places, for a header or a message; `within` names the schema."""
    all_paths = [within + finding.path for finding in findings]
    more = f", and {len(all_paths) - most} more" if len(all_paths) > most else ""
    return ", ".join(all_paths[:most]) + more


_kept: TenantCache[str, Plan | _Refusal] = TenantCache(_NUM_KEPT)


def _made(text: str) -> Plan | _Refusal:
    schema = json.loads(text)
    try:
        limits.check(schema)
        walk = Walk(schema, HANDLERS)
        decoding = walk.run()
        if Instances(decoding).have_overlapping_patterns():
            walk = Walk(schema, HANDLERS, follows_patterns=False)
            decoding = walk.run()
        Instances(decoding).close_names()
    except BadSchema as error:
        return error.problem, error.path
    rewritten = _text(decoding)
    if len(rewritten) > MAX_REWRITTEN_CHARS:
        return "has too many large classes of characters, as \\p{L} is one", ""
    return Plan(text, rewritten, tuple(walk.findings.values()))


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
