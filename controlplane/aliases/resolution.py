"""Resolve the name of an alias for the tenant in scope, and choose a target for each request."""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Iterator, Sequence

from django.db.models import Prefetch, QuerySet

from controlplane.adapters import resolution as adapters
from controlplane.adapters.models import AdapterVersion, is_serving
from controlplane.adapters.resolution import ResolvedModel, no_such_model
from controlplane.aliases.models import AliasPart, AliasRevision, is_current
from controlplane.tenants.models import is_slug

Target = AliasPart.Target
_LONG = ("json_schema", "system_prompt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AliasPlan:
    """The current revision of an alias, with the versions that answer."""

    alias_id: uuid.UUID
    revision_id: uuid.UUID
    number: int
    primary: ResolvedModel
    #: None without one, or while one of its versions cannot answer.
    canary: ResolvedModel | None
    canary_percent: int
    #: The limits' names for each target: of the alias, its adapters and their versions.
    primary_names: frozenset[str]
    canary_names: frozenset[str]

    def target(self, sticky: str) -> Target:
        """Return the caller's target, which stays the same until the canary's share changes.

        sticky  names the caller
        """
        if self.canary is None or self.canary_percent == 0 or self.canary.is_shut_down:
            return Target.PRIMARY
        share = bucket(self.alias_id, sticky)
        return Target.CANARY if share < self.canary_percent else Target.PRIMARY


def bucket(alias_id: uuid.UUID, sticky: str) -> float:
    """Return the caller's place, evenly spread from 0 to under 100.

    The canary answers the places below its percent: a higher percent moves callers to it, none
    away from it.
    """
    key = b"%b%b" % (alias_id.bytes, sticky.encode("utf-8", "surrogatepass"))
    digest = hashlib.blake2b(key, digest_size=7).digest()
    return int.from_bytes(digest) * 100 / 2**56


def alias_resolve(name: str) -> AliasPlan | None:
    """Return the plan of the alias; None if there is none of this name.

    Raises NotFound if its primary cannot answer: nothing is live, or its base model is off.
    """
    if not is_slug(name):
        return None
    rows = AliasRevision.objects.filter(is_current(), alias__name=name)
    revision = next(iter(_with_parts(rows)[:1]), None)
    if revision is None:
        return None
    plan = _plan(revision)
    if plan is None or not revision.base_model.is_active:
        raise no_such_model(name)
    return plan


def plans_of(rows: QuerySet[AliasRevision]) -> Iterator[tuple[AliasRevision, AliasPlan]]:
    """Yield revisions with their plans; leave out those whose primary cannot answer."""
    for revision in _with_parts(rows):
        plan = _plan(revision)
        if plan is not None:
            yield revision, plan


def models_list() -> list[ResolvedModel]:
    """Return what the tenant can use: the base models, then its adapters and aliases by name.

    An alias comes in place of the adapter of its name, also one that cannot answer.
    """
    rows = AliasRevision.objects.filter(is_current(), is_serving("base_model__"))
    found = adapters.models_list()
    named = {model.name: model for model in found if not model.is_base}
    for revision in _with_parts(rows):
        plan = _plan(revision)
        if plan is None or plan.primary.is_shut_down:
            named.pop(revision.alias.name, None)
        else:
            named[revision.alias.name] = plan.primary
    return [model for model in found if model.is_base] + [named[name] for name in sorted(named)]


def names_like(name: str) -> list[str]:
    """Return names that the tenant can use, among them some like this one."""
    rows = AliasRevision.objects.filter(is_current()).order_by("alias__name")
    aliases = rows.values_list("alias__name", flat=True)[: adapters.MAX_LIKE]
    return list(dict.fromkeys([*adapters.names_like(name), *aliases]))


def _with_parts(rows: QuerySet[AliasRevision]) -> QuerySet[AliasRevision]:
    parts = AliasPart.objects.select_related("version", "adapter__live_version")
    rows = rows.select_related("alias", "base_model").defer(*_LONG)
    return rows.prefetch_related(Prefetch("parts", parts.order_by("position")))


def _plan(revision: AliasRevision) -> AliasPlan | None:
    """Return the plan of a revision; None if its primary cannot answer."""
    parts = list(revision.parts.all())
    primary = [part for part in parts if part.target == Target.PRIMARY]
    canary = [part for part in parts if part.target == Target.CANARY]
    model = _resolved(revision, primary)
    if model is None:
        return None
    return AliasPlan(
        alias_id=revision.alias_id,
        revision_id=revision.pk,
        number=revision.number,
        primary=model,
        canary=_resolved(revision, canary),
        canary_percent=revision.canary_percent,
        primary_names=_limit_names(revision, primary),
        canary_names=_limit_names(revision, canary),
    )


def _resolved(revision: AliasRevision, parts: Sequence[AliasPart]) -> ResolvedModel | None:
    """Return the weighted sum of a target's parts; None if one has no ready version."""
    by_digest: dict[str, tuple[AdapterVersion, float]] = {}
    for part in parts:
        version = version_of(part)
        if version is None:
            return None
        _, weight = by_digest.get(version.digest, (version, 0.0))
        by_digest[version.digest] = version, weight + part.weight
    found = list(by_digest.values())
    if not found:
        return None
    is_one = len(found) == 1 and found[0][1] == 1.0
    return ResolvedModel(
        name=revision.alias.name,
        base_model=revision.base_model,
        version=found[0][0] if is_one else None,
        created=int(revision.alias.created_at.timestamp()),
        blend=() if is_one else tuple(found),
    )


def version_of(part: AliasPart) -> AdapterVersion | None:
    """Return the present version of a part, with its adapter; None if it cannot answer."""
    if part.number is not None:
        version = part.version
    else:
        version = None if part.adapter is None else part.adapter.live_version
    if version is None or version.status != AdapterVersion.Status.READY:
        return None
    if part.adapter is not None:
        version.adapter = part.adapter  # it is loaded, so no query is needed to name it
    return version


def _limit_names(revision: AliasRevision, parts: Sequence[AliasPart]) -> frozenset[str]:
    names = {revision.alias.name}
    for part in parts:
        version = version_of(part)
        names.add(part.adapter_name)
        if version is not None:
            names.add(f"{part.adapter_name}@{version.number}")
    return frozenset(names)
