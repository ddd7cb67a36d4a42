"""Ask the packages that use adapters before a name or a version of an adapter changes."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.infra.hooks import Hook
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import current_tenant_id

#: Called with a locked adapter, its versions that are about to go, and whether one stays live.
#: Raises Conflict, which names what uses them.
before_versions_go = Hook[[Adapter, Sequence[AdapterVersion], bool], None]()
#: Called with the name of an adapter that is about to be made. Raises Conflict.
before_name = Hook[[str], None]()


def versions_check(
    adapter: Adapter, gone: Sequence[AdapterVersion], *, stays_live: bool = True
) -> None:
    """Raise Conflict if something uses versions of a locked adapter that are about to go.

    stays_live  whether the adapter has a live version afterwards
    """
    before_versions_go(adapter, gone, stays_live)


def name_check(name: str) -> None:
    """Raise Conflict if something of the tenant has the name already. Call it in a transaction."""
    names_lock()
    before_name(name)


def names_lock() -> None:
    """Let nobody else give a name in the tenant in scope until the transaction ends."""
    lock_until_commit(f"names of models {current_tenant_id()}")
