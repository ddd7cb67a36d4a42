"""Make a backup of the database and the object store while the platform runs.

Objects never change, and each is written before the row that names it is committed. So the objects
that the dump's rows name are in the store when the dump's snapshot is taken. They are copied
before the dump, which can take hours, and what is new is copied after it: only an object that
was made and deleted in between can be missing, and the manifest names it.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from django.db import connection, transaction

from controlplane.infra import storage
from controlplane.maintenance.backups import database
from controlplane.maintenance.backups.folder import (
    DUMP,
    FORMAT,
    INDEX,
    BackupError,
    BackupFolder,
    Manifest,
    Object,
    ObjectIndex,
    digest_of,
)
from controlplane.tenancy.scoping import all_tenants

#: All objects of the platform are below it.
PREFIX = "t/"
_PROGRESS_S = 5.0
_MAX_NAMED = 100

Say = Callable[[str], None]


def back_up(path: Path, *, say: Say, keep: int | None = None) -> Manifest:
    """Make a backup in the folder `path`, with what earlier ones in it have. -> its manifest.

    keep  the number of backups that stay, this one included; None: all
    say   called with lines of progress

    Raises BackupError, storage.STORAGE_ERRORS, django.db.Error, OSError.
    """
    folder = BackupFolder(path)
    with folder.locked():
        manifest = _Run(folder, say).backup()
        if keep is not None:
            say(f"removed {folder.prune(keep)} older backups")
    return manifest


class _Run:
    def __init__(self, folder: BackupFolder, say: Say) -> None:
        self._folder = folder
        self._say = say

    def backup(self) -> Manifest:
        database.check_operator_sees_all()
        before = self._folder.names()[-1:]
        now = dt.datetime.now(dt.UTC)
        while [name := f"{now:%Y%m%dT%H%M%SZ}"] == before:
            time.sleep(0.1)
            now = dt.datetime.now(dt.UTC)
        new = self._folder.begin(name)
        with ExitStack() as stack:
            index = stack.enter_context(ObjectIndex.made(new / INDEX))
            earlier = [
                stack.enter_context(ObjectIndex.opened(self._folder.file(old, INDEX)))
                for old in before
            ]
            self._say("objects: copying")
            self._copy_objects(index, earlier)
            with transaction.atomic(durable=True):
                found = self._dump(new)
                self._say("objects: copying those made since")
                self._copy_objects(index, [index])
                missing, num_missing = self._missing(index)
                totals = index.totals()
        manifest = Manifest(
            name=name,
            format=FORMAT,
            made_at=now.isoformat(),
            objects=totals,
            missing=missing,
            num_missing=num_missing,
            files={part: digest_of(new / part) for part in (DUMP, INDEX)},
            **found,
        )
        self._folder.complete(new, manifest)
        return manifest

    def _dump(self, new: Path) -> dict[str, Any]:
        """Dump the database. The open transaction then has the same snapshot."""
        with connection.cursor() as cursor:
            cursor.execute("set transaction isolation level repeatable read")
            cursor.execute("set local idle_in_transaction_session_timeout = 0")
            cursor.execute("select pg_export_snapshot(), current_setting('server_version')")
            snapshot, version = cursor.fetchone()
        self._say("database: dumping")
        (new / DUMP).touch(mode=0o600)
        database.dump(new / DUMP, snapshot=snapshot)
        self._say(f"database: {_size((new / DUMP).stat().st_size)}; counting rows")
        return {
            "versions": {"postgresql": version},
            "migrations": database.applied_migrations(),
            "tables": database.count_rows(),
        }

    def _copy_objects(self, index: ObjectIndex, earlier: list[ObjectIndex]) -> None:
        copied = num_bytes = seen = 0
        said_at = time.monotonic()
        for stored in storage.objects(PREFIX):
            known = next((found for old in earlier if (found := old.get(stored.key))), None)
            if known is None or not self._has(known, stored):
                added = self._copy(stored)
                if added is None:
                    continue
                known, copied = added, copied + 1
                num_bytes += known.num_bytes
            index.add(known)
            seen += 1
            if time.monotonic() - said_at > _PROGRESS_S:
                said_at = time.monotonic()
                self._say(f"objects: {seen} seen, {copied} copied, {_size(num_bytes)}")
        self._say(f"objects: {seen} in the store, {copied} copied, {_size(num_bytes)}")

    def _has(self, known: Object, stored: storage.StoredObject) -> bool:
        """Return whether an earlier backup, or the first pass, has the object's bytes."""
        if (known.num_bytes, known.etag) != (stored.num_bytes, stored.etag):
            return False
        path = self._folder.object_file(known.sha256)
        return path.exists() and path.stat().st_size == known.num_bytes

    def _copy(self, stored: storage.StoredObject) -> Object | None:
        """Copy an object; None when it was deleted in between. Raises BackupError."""
        try:
            pieces = storage.read_pieces(stored.key, max_bytes=max(1, stored.num_bytes))
            sha256, length = self._folder.add_object(pieces)
        except storage.ObjectMissing:
            return None
        if length != stored.num_bytes:
            raise BackupError(
                f"{stored.key} has {stored.num_bytes} bytes in the store's list, but "
                f"{length} were read"
            )
        return Object(key=stored.key, num_bytes=length, etag=stored.etag, sha256=sha256)

    def _missing(self, index: ObjectIndex) -> tuple[list[str], int]:
        """Return the first keys that rows name and the store lacks, and their number."""
        first: list[str] = []
        count = 0
        with all_tenants(reason="a backup's rows and objects are compared"):
            for key in database.referenced_keys():
                if index.get(key) is None:
                    count += 1
                    if count <= _MAX_NAMED:
                        first.append(key)
        return first, count


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
