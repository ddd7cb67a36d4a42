"""Keep what current revisions of aliases name: the checks of `adapters.users`."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.models import Q

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.aliases.models import Alias, AliasPart, is_current
from controlplane.errors import Conflict
from controlplane.tenants.models import is_slug

_SHOWN = 5


def versions_check(adapter: Adapter, gone: Sequence[AdapterVersion], stays_live: bool) -> None:
    """Raise Conflict if a current revision names one of the versions.

    Without a live version afterwards also if one names whichever is live.
    """
    named = Q(version__in=gone)
    if not stays_live:
        named |= Q(adapter=adapter, number=None)
    names = aliases_of(named)
    if names:
        raise Conflict(
            f"{_listed(names)} this version of {adapter.name}. Change or delete the alias first.",
            code="used_by_alias",
        )


def adapter_name_check(name: str) -> None:
    """Raise Conflict if an alias has the name."""
    if Alias.objects.filter(name=name).exists():
        raise Conflict(f"{name} is the name of an alias.", param="name")


def check_no_alias(name: str) -> None:
    """Raise Conflict for the name of an alias: it is not retired as an adapter is."""
    if is_slug(name) and Alias.objects.filter(name=name).exists():
        raise Conflict(
            f"{name} is an alias. Delete it at /api/v1/aliases/{name}.",
            param="model",
            code="is_alias",
        )


def adapter_users(adapter: Adapter) -> list[str]:
    """Return the names of the aliases whose current revision names the adapter."""
    return aliases_of(Q(adapter=adapter))


def aliases_of(named: Q) -> list[str]:
    """Return the names of the aliases whose current revision has such a part."""
    parts = AliasPart.objects.filter(named, is_current("revision__"))
    names = parts.order_by("revision__alias__name").values_list("revision__alias__name", flat=True)
    return list(dict.fromkeys(names))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    whose = "The alias" if len(names) == 1 else "The aliases"
    verb = "needs" if len(names) == 1 else "need"
    return f"{whose} {', '.join(names[:_SHOWN])}{more} {verb}"
