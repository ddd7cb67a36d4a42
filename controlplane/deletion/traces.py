"""The traces of a tenant in PostgreSQL, the object store and Redis."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from django.apps import apps

from controlplane.deletion.steps import KEPT
from controlplane.infra import storage
from controlplane.infra.redis_client import redis_client
from controlplane.tenancy.epochs import moved_key
from controlplane.tenancy.scoping import TenantModel, tenant_scope
from controlplane.tenants.models import Tenant

_SCAN = 1000
#: Records of a stream that are searched at a time.
_PAGE = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traces:
    """Counts of rows, objects and keys that name a tenant."""

    tenant_id: str
    #: The status in its row in `tenants_tenant`; "" when there is none.
    status: str
    #: Rows by table.
    rows: dict[str, int]
    #: Rows that stay, by table.
    kept: dict[str, int]
    objects: int
    num_bytes: int
    unfinished_writes: int
    #: Keys with the tenant's id in their name or their content.
    redis_keys: list[str]

    @property
    def is_clean(self) -> bool:
        """Return whether only the rows that must stay are left."""
        return not (self.rows or self.objects or self.unfinished_writes or self.redis_keys)


def tenant_traces(tenant_id: uuid.UUID) -> Traces:
    """Look everywhere. Reads the names of all Redis keys, and all its records: it is slow.

    Raises storage.STORAGE_ERRORS, Unavailable without Redis.
    """
    tenant = Tenant.objects.filter(pk=tenant_id).first()
    with tenant_scope(tenant_id):
        counts = {
            model: model.objects.count()
            for model in apps.get_models()
            if issubclass(model, TenantModel)
        }
    prefix = f"t/{tenant_id}/"
    sizes = [stored.num_bytes for stored in storage.objects(prefix)]
    return Traces(
        tenant_id=str(tenant_id),
        status=tenant.status if tenant else "",
        rows={m._meta.db_table: n for m, n in counts.items() if n and m not in KEPT},
        kept={m._meta.db_table: n for m, n in counts.items() if n and m in KEPT},
        objects=len(sizes),
        num_bytes=sum(sizes),
        unfinished_writes=len(storage.unfinished_writes(prefix)),
        redis_keys=_redis_keys(str(tenant_id).encode()),
    )


def _redis_keys(wanted: bytes) -> list[str]:
    with redis_client() as client:
        keys = client.scan_iter(count=_SCAN)
        found = {key for key in keys if wanted in key or _holds(client, key, wanted)}
    # Only the time of the last change, which expires: while the database is away, gateways do
    # not use older knowledge of the tenant.
    found.discard(moved_key(wanted.decode()).encode())
    return sorted(key.decode(errors="replace") for key in found)


def _holds(client: Any, key: bytes, wanted: bytes) -> bool:
    """Return whether a record of the key names the tenant."""
    kind = client.type(key)
    if kind == b"string":
        return wanted in (client.get(key) or b"")
    if kind == b"hash":
        return any(wanted in name or wanted in value for name, value in client.hscan_iter(key))
    if kind == b"set":
        return any(wanted in member for member in client.sscan_iter(key))
    if kind == b"zset":
        return any(wanted in member for member, _ in client.zscan_iter(key))
    if kind == b"list":
        return any(wanted in item for item in client.lrange(key, 0, -1))
    if kind == b"stream":
        return _stream_holds(client, key, wanted)
    return False


def _stream_holds(client: Any, key: bytes, wanted: bytes) -> bool:
    after = b"-"
    while entries := client.xrange(key, min=after, count=_PAGE):
        if any(wanted in value for _, fields in entries for value in fields.values()):
            return True
        after = b"(" + entries[-1][0]
    return False
