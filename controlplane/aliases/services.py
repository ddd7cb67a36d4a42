"""All changes to aliases of the tenant in scope.

Each change makes a revision and sets the alias to it by compare-and-set, in one transaction with
its audit event. Gateways see it within half a second, as what is live (`inference.access`).

Locks are taken in this order: names, aliases, adapters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from django.db import transaction
from django.db.models.functions import Length
from django.utils import timezone

from controlplane.adapters import promotion, users
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.aliases.compatibility import breaking_changes
from controlplane.aliases.contents import Contents, Part, Target, canary_of, check_text, contents_of
from controlplane.aliases.models import Alias, AliasRevision, is_current
from controlplane.aliases.revisions import revision_store, targets_find
from controlplane.errors import Conflict, InvalidRequest, require
from controlplane.events.audit.services import record
from controlplane.tenancy.model_scope import check_named
from controlplane.tenants.models import SLUG_RULE, is_slug

#: Largest number of a tenant's aliases.
MAX_ALIASES = 200
#: Largest number of an alias's revisions; the oldest are deleted.
MAX_REVISIONS = 200
#: Largest length of its schemas and system prompts together; the newest two always stay.
MAX_REVISION_CHARS = 500_000
MAX_REASON_CHARS = promotion.MAX_REASON_CHARS

Cause = AliasRevision.Cause


def alias_get(*, name: str) -> Alias:
    """Return the alias of this name. Raises NotFound."""
    check_named(name, "name")
    found = Alias.objects.filter(name=name).first() if is_slug(name) else None
    return require(found, "There is no such alias.")


def revision_get(*, alias: Alias, number: int | None = None) -> AliasRevision:
    """Return a revision of an alias, without a number the current one. Raises NotFound."""
    rows = AliasRevision.objects.select_related("alias", "base_model").prefetch_related("parts")
    rows = rows.filter(alias=alias)
    if number is None:
        return rows.get(is_current())
    found = rows.filter(number=min(number, 2**31 - 1)).first()
    return require(found, "There is no such revision, or it is no longer kept.")


@transaction.atomic
def alias_create(*, name: str, contents: Contents, reason: str = "") -> Alias:
    """Make an alias with its first revision.

    Its name is free, or that of an adapter: then each target must have a part of this adapter.
    Raises InvalidRequest, Conflict for a taken name or a version that is not ready.
    """
    check_named(name, "name")
    _check_reason(reason)
    if not is_slug(name):
        raise InvalidRequest(SLUG_RULE, param="name")
    contents = contents.checked()
    users.names_lock()
    if BaseModel.objects.filter(name=name).exists():
        raise Conflict(f"{name} is the name of a base model.", param="name")
    if Alias.objects.filter(name=name).exists():
        raise Conflict(f"The alias {name} already exists.", param="name")
    if Alias.objects.count() >= MAX_ALIASES:
        raise Conflict(f"A tenant can have at most {MAX_ALIASES} aliases.", code="too_many_aliases")
    alias = Alias(name=name)
    found = targets_find(alias, contents)
    alias.save(force_insert=True)
    revision_store(alias, 1, contents, found, Cause.CREATED, reason)
    record("created", alias, after={"name": name, "revision": 1} | contents.summary())
    return alias


def alias_change(
    *,
    alias: Alias,
    changes: Mapping[str, Any],
    reason: str = "",
    if_revision: int | None = None,
    is_forced: bool = False,
) -> Alias:
    """Make a revision with these fields of `Contents` changed; without a difference none is made.

    if_revision  the number that the current revision must have
    is_forced    also with a schema that breaks callers of the current one
    Raises InvalidRequest, Conflict.
    """

    def change(current: AliasRevision) -> _Change:
        contents = dataclasses.replace(contents_of(current), **changes)
        if not contents.canary and "canary_percent" not in changes:
            contents = dataclasses.replace(contents, canary_percent=0)
        return _Change(contents, Cause.CHANGED, breaks_schema=is_forced)

    return _switch(alias, change, reason, if_revision)


def alias_ramp(
    *, alias: Alias, percent: int, reason: str = "", if_revision: int | None = None
) -> Alias:
    """Set the share of the callers whom the canary answers. Raises Conflict without a canary."""

    def change(current: AliasRevision) -> _Change:
        contents = contents_of(current)
        _check_has_canary(alias, contents)
        return _Change(dataclasses.replace(contents, canary_percent=percent), Cause.RAMPED)

    return _switch(alias, change, reason, if_revision)


def canary_promote(*, alias: Alias, reason: str = "", if_revision: int | None = None) -> Alias:
    """Make the canary the primary.

    If the primary is whichever version of an adapter is live, and the canary is a version of the
    same adapter, this version becomes live, and the primary stays as it is.
    Raises Conflict without a canary.
    """

    def change(current: AliasRevision) -> _Change:
        contents = contents_of(current)
        _check_has_canary(alias, contents)
        going = live_canary(contents)
        new = contents.canary if going is None else contents.primary
        version = None if going is None else going.version
        new_contents = dataclasses.replace(contents, primary=new, canary=(), canary_percent=0)
        return _Change(new_contents, Cause.CANARY_PROMOTED, goes_live=version)

    return _switch(alias, change, reason, if_revision)


def live_canary(contents: Contents) -> Part | None:
    """Return the version that becomes live with the promotion of the canary; None: none does."""
    [*_, primary], [*_, canary] = contents.primary, contents.canary
    is_live_primary = contents.primary == (Part(adapter=primary.adapter),)
    is_same = contents.canary == (Part(adapter=primary.adapter, version=canary.version),)
    return canary if is_live_primary and is_same else None


def canary_remove(*, alias: Alias, reason: str = "", if_revision: int | None = None) -> Alias:
    """Take the canary away: the primary answers everybody. Raises Conflict without a canary."""

    def change(current: AliasRevision) -> _Change:
        contents = contents_of(current)
        _check_has_canary(alias, contents)
        contents = dataclasses.replace(contents, canary=(), canary_percent=0)
        return _Change(contents, Cause.CANARY_REMOVED)

    return _switch(alias, change, reason, if_revision)


def canary_fail(*, alias: Alias, reason: str, if_revision: int) -> Alias:
    """Give the canary no more requests. Raises Conflict for another revision."""

    def change(current: AliasRevision) -> _Change:
        return _Change(
            dataclasses.replace(contents_of(current), canary_percent=0), Cause.CANARY_FAILED
        )

    return _switch(alias, change, reason, if_revision)


def alias_roll_back(
    *,
    alias: Alias,
    number: int | None = None,
    reason: str = "",
    if_revision: int | None = None,
) -> Alias:
    """Make a revision that copies an earlier one; its schema may break callers of the current one.

    number  of the earlier one; None: the one that held before (`revision_before`). A second call
            goes back further.
    Raises NotFound for a number that is not kept, Conflict if a version of it is not ready.
    """

    def change(current: AliasRevision) -> _Change:
        earlier = (
            revision_before(current) if number is None else revision_get(alias=alias, number=number)
        )
        contents = contents_of(earlier)
        _check_not_deleted(earlier)
        origin = earlier.copied_from or earlier.number
        return _Change(contents, Cause.ROLLED_BACK, copied_from=origin, breaks_schema=True)

    return _switch(alias, change, reason, if_revision)


@transaction.atomic
def alias_delete(*, alias: Alias) -> None:
    """Delete an alias with its revisions; new requests do not find it."""
    alias = Alias.objects.select_for_update().get(pk=alias.pk)
    before = {"name": alias.name, "revision": alias.revision_number}
    before |= contents_of(revision_get(alias=alias)).summary()
    record("deleted", alias, before=before)
    alias.delete()


def adapter_release(*, adapter: Adapter) -> None:
    """Take an adapter that is to be deleted out of all aliases.

    An alias whose primary names it is deleted; from others the canary is removed. Call it in a
    transaction, before the adapter is locked.
    """
    users.names_lock()  # a new alias would lock adapters in another order
    for alias in Alias.objects.select_for_update().order_by("pk"):
        parts = revision_get(alias=alias).parts.all()
        targets = {part.target for part in parts if part.adapter_id == adapter.pk}
        if targets:
            check_named(alias.name, "force")
        if Target.PRIMARY in targets:
            alias_delete(alias=alias)
        elif targets:
            canary_remove(alias=alias, reason=f"The adapter {adapter.name} was deleted.")


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """A revision to be made.

    breaks_schema  whether it may
    goes_live      the number of the primary's version that becomes live
    """

    contents: Contents
    cause: Cause
    copied_from: int | None = None
    breaks_schema: bool = False
    goes_live: int | None = None


@transaction.atomic
def _switch(
    alias: Alias,
    change: Callable[[AliasRevision], _Change],
    reason: str,
    if_revision: int | None,
) -> Alias:
    """Make the next revision and set the alias to it."""
    _check_reason(reason)
    found = Alias.objects.select_for_update().filter(pk=alias.pk).first()
    found = require(found, "There is no such alias.")
    if if_revision not in (None, found.revision_number):
        raise Conflict(
            f"The current revision is {found.revision_number}, not {if_revision}: read it again.",
            param="if_revision",
            code="revision_changed",
        )
    current = revision_get(alias=found)
    wanted: _Change = change(current)
    before, contents = contents_of(current), wanted.contents.checked()
    if contents.is_same(before) and wanted.goes_live is None:
        return found
    if not wanted.breaks_schema:
        _check_compatible(before, contents)
    adapters = targets_find(found, contents, before)
    number = found.revision_number + 1
    revision_store(found, number, contents, adapters, wanted.cause, reason, wanted.copied_from)
    if wanted.goes_live is not None:
        version = AdapterVersion.objects.get(
            adapter=adapters[contents.primary[0].adapter], number=wanted.goes_live
        )
        promotion.adapter_version_promote(version=version, reason=reason)
    now = timezone.now()
    same = Alias.objects.filter(pk=found.pk, revision_number=number - 1)
    if not same.update(revision_number=number, updated_at=now):
        raise Conflict(
            "Somebody else has changed the alias: repeat the call.", code="revision_changed"
        )
    _forget_old(found, number)
    said: dict[str, Any] = {"revision": number, "cause": wanted.cause.value}
    said |= {"reason": reason} if reason else {}
    old, new = before.summary(), contents.summary()
    changed = [name for name in new if new[name] != old[name]]
    record(
        "revised",
        found,
        before={"revision": number - 1} | {name: old[name] for name in changed},
        after=said | {name: new[name] for name in changed},
    )
    found.revision_number, found.updated_at = number, now
    return found


def _forget_old(alias: Alias, number: int) -> None:
    """Delete the oldest revisions of an alias beyond what is kept; `number` is the newest."""
    size = Length("json_schema") + Length("system_prompt")
    rows = AliasRevision.objects.filter(alias=alias).order_by("-number")
    sizes = list(rows.values_list("number", size)[:MAX_REVISIONS])
    totals = itertools.accumulate(num_chars for _, num_chars in sizes)
    kept = [
        each
        for (each, _), total in zip(sizes, totals, strict=True)
        if total <= MAX_REVISION_CHARS or each >= number - 1
    ]
    AliasRevision.objects.filter(alias=alias, number__lt=kept[-1]).delete()


def revision_before(current: AliasRevision) -> AliasRevision:
    """Return the last revision before, as if those that were rolled back had not been made.

    Revisions that gave requests to a canary that failed later are left out, and those equal to the
    current one. Raises Conflict if no other is left.
    """
    origin = current.copied_from or current.number
    rows = AliasRevision.objects.filter(alias=current.alias).prefetch_related("parts")
    failures = rows.filter(cause=Cause.CANARY_FAILED).order_by("number")
    failed = {canary_of(row): row.number for row in failures}  # the newest of each canary
    earlier = rows.filter(number__lt=origin).order_by("-number")
    for row in earlier.defer("json_schema", "system_prompt"):
        if row.canary_percent and failed.get(canary_of(row), 0) > row.number:
            continue
        found = revision_get(alias=current.alias, number=row.number)
        if not contents_of(found).is_same(contents_of(current)):
            return found
    raise Conflict("There is no earlier revision to go back to.", code="no_earlier_revision")


def _check_not_deleted(revision: AliasRevision) -> None:
    for part in revision.parts.all():
        if part.adapter_id is None or (part.number is not None and part.version_id is None):
            raise Conflict(
                f"{part} of revision {revision.number} was deleted: choose another revision.",
                code="target_deleted",
            )


def _check_has_canary(alias: Alias, contents: Contents) -> None:
    if not contents.canary:
        raise Conflict(f"The alias {alias.name} has no canary.", code="no_canary")


def _check_compatible(before: Contents, after: Contents) -> None:
    if before.json_schema is None:
        return
    broken = breaking_changes(before.json_schema, after.json_schema)
    if broken:
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        raise Conflict(
            f"The schema breaks callers: {'; '.join(broken[:5])}{more}. Set force to change it.",
            param="json_schema",
            code="breaking_schema",
        )


def _check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidRequest(
            f"A reason can have at most {MAX_REASON_CHARS} characters.", param="reason"
        )
    check_text(reason, "reason")
