"""Checks that other packages make before names and versions of adapters change.

These packages import this one, so they add their checks when they start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import current_tenant_id

#: Called with a locked adapter, its versions that are about to go, and whether one stays live.
#: Raises Conflict, which names what uses them.
VERSION_CHECKS: list[Callable[[Adapter, Sequence[AdapterVersion], bool], None]] = []
#: Called with the name of an adapter that is about to be made. Raises Conflict.
NAME_CHECKS: list[Callable[[str], None]] = []


def versions_check(
    adapter: Adapter, gone: Sequence[AdapterVersion], *, stays_live: bool = True
) -> None:
    """Raise Conflict if something uses versions of a locked adapter that are about to go.

    stays_live  whether the adapter has a live version afterwards
    """
    for check in VERSION_CHECKS:
        check(adapter, gone, stays_live)


def name_check(name: str) -> None:
    """Raise Conflict if something of the tenant has the name already. Call it in a transaction."""
    names_lock()
    for check in NAME_CHECKS:
        check(name)


def names_lock() -> None:
    """Let nobody else give a name in the tenant in scope until the transaction ends."""
    lock_until_commit(f"names of models {current_tenant_id()}")
