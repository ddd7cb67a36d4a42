"""The store is asked outside of transactions, and leaves nothing when two ask at once."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import pytest
from django.db import connection

from controlplane.adapters import uploads
from controlplane.adapters.models import VersionUpload
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.adapters.test_uploads import (
    CONFIG,
    TENSORS,
    VERSIONS,
    _wide_base,
    begin,
    left_of,
    send,
    version_of,
)
from tests.controlplane.conftest import Party, as_key

__all__ = ["_wide_base"]


def watch(monkeypatch: pytest.MonkeyPatch, called: list[str], depth: int, *names: str) -> None:
    for name in names:
        usual = getattr(storage, name)

        def guarded(*args: Any, usual: Any = usual, name: str = name, **options: Any) -> Any:
            assert len(connection.savepoint_ids) == depth, f"{name} in a transaction"
            called.append(name)
            return usual(*args, **options)

        monkeypatch.setattr(storage, name, guarded)


def test_no_transaction_waits_for_the_store(acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    depth = len(connection.savepoint_ids)
    client = as_key(acme)
    begin(client)
    names = ("multipart_begin", "multipart_parts", "multipart_finish", "object_size")
    watch(monkeypatch, called, depth, *names)
    send(client, CONFIG)
    send(client, TENSORS)
    assert client.post(f"{VERSIONS}/1/complete").status_code == 202
    assert {"multipart_begin", "multipart_parts", "multipart_finish"} <= set(called)


def test_of_two_that_begin_one_upload_stays(acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call begins while the first asks the store, and ends before it."""
    client = as_key(acme)
    begin(client)
    version = version_of(acme)
    usual, lock, inner = storage.multipart_begin, threading.Lock(), []
    parts = {"1": hashlib.sha256(b"x").hexdigest()}

    def begin_twice(key: str) -> str:
        if lock.acquire(blocking=False):
            inner.extend(uploads.parts_sign(version=version, file=CONFIG, digests=parts))
        return usual(key)

    monkeypatch.setattr(storage, "multipart_begin", begin_twice)
    with tenant_scope(acme.tenant.id):
        outer = uploads.parts_sign(version=version, file=CONFIG, digests=parts)
        row = VersionUpload.objects.get(version=version, file=CONFIG)
    assert row.upload_id in inner[0]["url"] and row.upload_id in outer[0]["url"]
    assert len(left_of(version)) == 1
