"""Find the adapters that a revision names, and store the revision."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.aliases.contents import Contents, Part, Target
from controlplane.aliases.models import Alias, AliasPart, AliasRevision
from controlplane.errors import Conflict, InvalidRequest
from controlplane.events.audit.origin import current_origin
from controlplane.tenancy.model_scope import check_named

Cause = AliasRevision.Cause
Status = AdapterVersion.Status


def targets_find(
    alias: Alias, contents: Contents, before: Contents | None = None
) -> dict[str, Adapter]:
    """Return the adapters of the targets, by name; they stay as they are until the commit.

    before  what the current revision says: its primary, and a canary that nobody gets, may stay
            though they can no longer answer; else nothing of the alias could be changed
    Raises PermissionDenied for what the caller may not name and the alias does not name already,
    InvalidRequest for targets that do not exist or do not go together, Conflict for a version that
    cannot answer.
    """
    known = {part.model for part in before.parts} if before is not None else set()
    for field, parts in (("primary", contents.primary), ("canary", contents.canary)):
        for part in parts:
            if part.model not in known:
                check_named(part.model, field)
    names = {part.adapter for part in contents.parts}
    rows = Adapter.objects.select_for_update(of=("self",)).filter(name__in=names)
    found = {
        adapter.name: adapter
        for adapter in rows.select_related("base_model", "live_version").order_by("pk")
    }
    has_own_adapter = Adapter.objects.filter(name=alias.name).exists()
    stays = before is not None and contents.primary == before.primary
    is_unused = before is not None and contents.canary == before.canary
    is_unused = is_unused and contents.canary_percent == 0
    targets = (("primary", contents.primary, stays), ("canary", contents.canary, is_unused))
    for field, parts, may_have_ended in targets:
        for part in parts:
            adapter = _adapter_of(found, part, field)
            if not may_have_ended:
                _check_answers(adapter, part, field)
        if parts and has_own_adapter and all(part.adapter != alias.name for part in parts):
            raise InvalidRequest(
                f"{alias.name} is an adapter: each target of its alias must have a version of it.",
                param=field,
            )
    bases = sorted({adapter.base_model.name for adapter in found.values()})
    if len(bases) > 1:
        raise InvalidRequest(
            f"The targets are of several base models: {', '.join(bases)}.", param="primary"
        )
    return found


def _adapter_of(found: Mapping[str, Adapter], part: Part, field: str) -> Adapter:
    adapter = found.get(part.adapter)
    if adapter is None:
        raise InvalidRequest(f"There is no adapter {part.adapter}.", param=field)
    return adapter


def _check_answers(adapter: Adapter, part: Part, field: str) -> None:
    if part.version is None:
        if adapter.live_version is None:
            raise Conflict(
                f"No version of {adapter.name} is live.", param=field, code="no_live_version"
            )
        return
    version = AdapterVersion.objects.filter(adapter=adapter, number=part.version).first()
    if version is None:
        raise InvalidRequest(f"There is no version {part.version} of {adapter.name}.", param=field)
    if version.status != Status.READY:
        raise Conflict(
            f"Version {part.version} of {adapter.name} is {version.status}, not ready.",
            param=field,
            code="version_not_ready",
        )
    if version.is_shut_down:
        raise Conflict(
            f"Version {part.version} of {adapter.name} was shut down on {version.shutdown_date}.",
            param=field,
            code="version_not_ready",
        )


def revision_store(
    alias: Alias,
    number: int,
    contents: Contents,
    adapters: Mapping[str, Adapter],
    cause: Cause,
    reason: str,
    copied_from: int | None = None,
) -> None:
    """Write a revision with its parts."""
    origin = current_origin()
    revision = AliasRevision.objects.create(
        alias=alias,
        number=number,
        cause=cause,
        reason=reason,
        actor_type=origin.actor_type,
        actor_name=origin.actor_name or origin.actor_id[:320],
        base_model=adapters[contents.primary[0].adapter].base_model,
        canary_percent=contents.canary_percent,
        json_schema=contents.schema_text,
        system_prompt=contents.system_prompt,
        sampling=contents.sampling,
        warmth=contents.warmth,
        guard=contents.guard,
        copied_from=copied_from,
    )
    versions = {
        (version.adapter_id, version.number): version
        for version in AdapterVersion.objects.filter(
            adapter__in=adapters.values(), number__in=[part.version for part in contents.parts]
        )
    }
    targets = ((Target.PRIMARY, contents.primary), (Target.CANARY, contents.canary))
    AliasPart.objects.bulk_create(
        AliasPart(
            revision=revision,
            target=target,
            position=position,
            adapter=adapters[part.adapter],
            adapter_name=part.adapter,
            version=versions.get((adapters[part.adapter].pk, part.version or 0)),
            number=part.version,
            weight=part.weight,
        )
        for target, parts in targets
        for position, part in enumerate(parts)
    )
