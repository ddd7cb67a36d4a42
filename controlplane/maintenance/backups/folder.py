"""A folder of backups, which share the objects that they have in common.

    backups/20261123T093344Z/manifest.json    what the backup consists of
    backups/20261123T093344Z/database.dump    in pg_dump's custom format
    backups/20261123T093344Z/objects.sqlite   each object's key, length, ETag and SHA-256
    objects/3f/3fa4…                          the bytes of each object, named by their SHA-256

A backup's folder has the suffix `.incomplete` until it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FORMAT = 1
DUMP, INDEX, MANIFEST = "database.dump", "objects.sqlite", "manifest.json"
_INCOMPLETE = ".incomplete"
_NAME = re.compile(r"\d{8}T\d{6}Z")
_PIECE_BYTES = 1 << 20


class BackupError(Exception):
    """Raised when a backup cannot be made or used; the message says which part, and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """An object of the store, as the backup has it."""

    key: str
    num_bytes: int
    etag: str
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The parts of a complete backup. It contains no secret."""

    name: str
    format: int
    made_at: str
    #: Versions of the database server and of pg_dump.
    versions: dict[str, str]
    #: App -> the migrations that were applied.
    migrations: dict[str, list[str]]
    #: Table -> its rows.
    tables: dict[str, int]
    #: "count" and "bytes".
    objects: dict[str, int]
    #: The first 100 keys that rows name and the store did not have; and their number.
    missing: list[str]
    num_missing: int
    #: File -> "bytes" and "sha256".
    files: dict[str, dict[str, Any]]


class BackupFolder:
    """The backups in a folder, which is made if it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process write into the folder. Raises BackupError when another one does."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BackupError(f"another process is writing to {self.path}") from error
            yield

    def names(self) -> list[str]:
        """Return the names of complete backups, the oldest first."""
        found = self.path.glob("backups/*")
        return sorted(entry.name for entry in found if _NAME.fullmatch(entry.name))

    def file(self, name: str, part: str) -> Path:
        return self.path / "backups" / name / part

    def object_file(self, sha256: str) -> Path:
        return self.path / "objects" / sha256[:2] / sha256

    def begin(self, name: str) -> Path:
        """Return a new backup's folder, after removing what killed runs left."""
        for left in self.path.glob(f"backups/*{_INCOMPLETE}"):
            shutil.rmtree(left)
        for left in self.path.glob("objects/*/*.part"):
            left.unlink()
        folder = self.path / "backups" / f"{name}{_INCOMPLETE}"
        folder.mkdir(mode=0o700, parents=True)
        return folder

    def complete(self, folder: Path, manifest: Manifest) -> None:
        """Write the manifest and give the folder its name."""
        path = folder / MANIFEST
        path.write_text(json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True) + "\n")
        path.chmod(0o600)
        for entry in folder.iterdir():
            _sync(entry)
        _sync(folder)
        folder.rename(folder.with_name(manifest.name))
        _sync(folder.parent)

    def add_object(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Write an object's bytes. -> their SHA-256 and length."""
        (self.path / "objects").mkdir(mode=0o700, exist_ok=True)
        staging = self.path / "objects" / f"{os.getpid()}.part"
        digest, length = hashlib.sha256(), 0
        with open(staging, "wb", opener=_private) as file:
            for piece in pieces:
                digest.update(piece)
                length += len(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        target = self.object_file(digest.hexdigest())
        target.parent.mkdir(mode=0o700, exist_ok=True)
        staging.replace(target)
        return digest.hexdigest(), length

    def manifest(self, name: str) -> Manifest:
        """Return a backup's manifest. Raises BackupError."""
        path = self.file(name, MANIFEST)
        try:
            fields = json.loads(path.read_text())
            if fields["format"] > FORMAT:
                raise BackupError(f"{path} is of a newer version of this program")
            return Manifest(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BackupError(f"{path} cannot be read: {error}") from error

    def prune(self, keep: int) -> int:
        """Remove all but the newest `keep` backups, and objects that none has. -> their number."""
        names = self.names()
        removed = names[: max(0, len(names) - keep)]
        for name in removed:
            # A removal that is killed leaves an incomplete backup, which the next one removes.
            folder = self.path / "backups" / name
            left = folder.with_name(f"{name}{_INCOMPLETE}")
            folder.rename(left)
            shutil.rmtree(left)
        if removed:
            with contextlib.ExitStack() as stack:
                kept = [
                    stack.enter_context(ObjectIndex.opened(self.file(name, INDEX)))
                    for name in self.names()
                ]
                for path in self.path.glob("objects/*/*"):
                    if not any(index.has_bytes(path.name) for index in kept):
                        path.unlink()
        return len(removed)


class ObjectIndex:
    """The objects of a backup, in a file of SQLite: memory does not grow with their number."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path)

    @classmethod
    @contextlib.contextmanager
    def made(cls, path: Path) -> Iterator[ObjectIndex]:
        with open(path, "xb", opener=_private):
            pass
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(
                "create table objects (key text primary key, num_bytes integer, etag text, "
                "sha256 text) without rowid"
            )
            database.execute("create index objects_sha256 on objects (sha256)")
            database.commit()
        with cls.opened(path) as index:
            yield index
            index._database.commit()

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path) -> Iterator[ObjectIndex]:
        index = cls(path)
        try:
            yield index
        except sqlite3.DatabaseError as error:
            raise BackupError(
                f"{path} is damaged: {error}; remove this backup, or restore another"
            ) from error
        finally:
            index._database.close()

    def add(self, entry: Object) -> None:
        self._database.execute(
            "insert or replace into objects values (?, ?, ?, ?)",
            (entry.key, entry.num_bytes, entry.etag, entry.sha256),
        )

    def get(self, key: str) -> Object | None:
        row = self._database.execute("select * from objects where key = ?", (key,)).fetchone()
        return None if row is None else _object(row)

    def has_bytes(self, sha256: str) -> bool:
        row = self._database.execute("select 1 from objects where sha256 = ?", (sha256,))
        return row.fetchone() is not None

    def totals(self) -> dict[str, int]:
        row = self._database.execute("select count(*), coalesce(sum(num_bytes), 0) from objects")
        count, num_bytes = row.fetchone()
        return {"count": count, "bytes": num_bytes}

    def __iter__(self) -> Iterator[Object]:
        for row in self._database.execute("select * from objects order by key"):
            yield _object(row)


def _object(row: tuple[str, int, str, str]) -> Object:
    return Object(key=row[0], num_bytes=row[1], etag=row[2], sha256=row[3])


def pieces_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def digest_of(path: Path) -> dict[str, Any]:
    """Return a file's "bytes" and "sha256"."""
    digest, length = hashlib.sha256(), 0
    for piece in pieces_of(path):
        digest.update(piece)
        length += len(piece)
    return {"bytes": length, "sha256": digest.hexdigest()}


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
