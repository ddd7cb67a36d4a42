"""Restore a backup into an empty installation.

The backup is checked as a whole before anything changes. The database comes last, in one
transaction: after an interruption the installation is empty or incomplete, and the restore can be
repeated with `force`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import redis
from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.loader import MigrationLoader

from controlplane.events.audit.services import record_named
from controlplane.infra import storage
from controlplane.maintenance.backups import database
from controlplane.maintenance.backups.backing_up import PREFIX
from controlplane.maintenance.backups.folder import (
    DUMP,
    INDEX,
    BackupError,
    BackupFolder,
    Manifest,
    ObjectIndex,
    digest_of,
    pieces_of,
)
from controlplane.operator.service_keys.models import ServiceKey
from controlplane.tenancy.database.ownership import as_owner
from controlplane.tenancy.scope import OPERATOR_ROLE
from controlplane.tenants.models import ApiKey
from controlplane.tenants.pepper_change import key_counts

Say = Callable[[str], None]
_PROGRESS_S = 5.0
#: Time that connections may take to end after they were closed.
_GOING_S = 3.0


def check(path: Path, *, name: str | None, say: Say) -> tuple[BackupFolder, Manifest]:
    """Read the whole backup and compare it with its checksums. -> its folder and manifest.

    name  of the backup; None: the newest

    Raises BackupError, which names the broken part.
    """
    folder = BackupFolder(path)
    names = folder.names()
    if not names:
        raise BackupError(f"there is no complete backup in {path}")
    if name is not None and name not in names:
        raise BackupError(f"there is no complete backup {name} in {path}, but {', '.join(names)}")
    manifest = folder.manifest(name or names[-1])
    say(f"checking the backup {manifest.name}, made at {manifest.made_at}")
    for part in (DUMP, INDEX):
        _check_file(folder.file(manifest.name, part), manifest.files.get(part))
    with ObjectIndex.opened(folder.file(manifest.name, INDEX)) as index:
        if index.totals() != manifest.objects:
            raise BackupError(f"{folder.file(manifest.name, INDEX)} is not the manifest's")
        progress = _Progress("objects checked", manifest, say)
        for entry in index:
            path = folder.object_file(entry.sha256)
            expected = {"bytes": entry.num_bytes, "sha256": entry.sha256}
            _check_file(path, expected, what=f"the object {entry.key}")
            progress.add(entry.num_bytes)
    progress.end()
    return folder, manifest


def _check_file(path: Path, expected: dict[str, object] | None, *, what: str = "") -> None:
    name = f"{path} ({what})" if what else str(path)
    try:
        found = digest_of(path)
    except OSError as error:
        raise BackupError(f"{name} cannot be read: {error.strerror}") from error
    if expected is None or found["bytes"] != expected["bytes"]:
        raise BackupError(f"{name} is incomplete: it has {found['bytes']} bytes")
    if found["sha256"] != expected["sha256"]:
        raise BackupError(f"{name} is damaged: its checksum is wrong")


def restore(path: Path, *, name: str | None, force: bool, say: Say) -> Manifest:
    """Restore a backup; return its manifest.

    name   of the backup; None: the newest
    force  replace what the installation has

    Raises BackupError, storage.STORAGE_ERRORS, django.db.Error, OSError.
    """
    _check_roles()
    _check_nobody_is_connected()
    if not force:
        _check_empty()
    folder, manifest = check(path, name=name, say=say)
    _check_migrations(manifest)
    storage.ensure_bucket()
    _put_objects(folder, manifest, say)
    say("database: restoring")
    with as_owner(connection):
        _empty_database()
        connection.close()
        database.load(folder.file(manifest.name, DUMP))
        with connection.cursor() as cursor:  # the dump has no rights; `migrate` grants the rest
            cursor.execute(f"grant select on all tables in schema public to {OPERATOR_ROLE}")
        say("database: counting rows")
        _check_counts(manifest)
    say("database: migrating")
    call_command("migrate", interactive=False, verbosity=0)
    with transaction.atomic():
        record_named("restored", "installation", manifest.name, after={"made_at": manifest.made_at})
    return manifest


def notes() -> list[str]:
    """Return notes on the steps that remain after a restore."""
    found = []
    foreign = key_counts(ApiKey, ServiceKey).foreign
    if foreign:
        found.append(
            f"LORIKEET_KEY_PEPPER is not the pepper of {foreign} API keys: set the "
            "installation's pepper, else neither these keys nor second factors work"
        )
    for variable, url in (
        ("REDIS_URL", settings.REDIS_URL),
        ("CELERY_BROKER_URL", settings.CELERY_BROKER_URL),
    ):
        try:
            with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
                if client.dbsize():
                    found.append(
                        f"the Redis of {variable} is not empty: its jobs belong to "
                        "another state of the database; empty it (`redis-cli flushdb`) before "
                        "the platform starts"
                    )
        except (redis.RedisError, OSError) as error:
            found.append(f"{variable}: {error}")
    found.append("run `manage.py verify_audit` and `manage.py doctor`, then start the platform")
    return found


def _check_roles() -> None:
    with connection.cursor() as cursor:
        cursor.execute("select rolname from pg_roles")
        roles = {name for (name,) in cursor.fetchall()}
        wanted = {OPERATOR_ROLE, settings.DATABASE_APPLICATION_ROLE}
        if wanted - roles:
            raise BackupError(
                f"the database has no role {', '.join(sorted(wanted - roles))}: run the statements "
                "of deploy/postgres.sh as a superuser"
            )
    with as_owner(connection), connection.cursor() as cursor:
        cursor.execute(
            "select current_user, pg_has_role(current_user, datdba, 'usage') from pg_database "
            "where datname = current_database()"
        )
        user, is_owner = cursor.fetchone()
        if not is_owner:
            raise BackupError(
                f"{user} does not own the database: set DATABASE_OWNER_URL (in Compose the service "
                "`backup` has it)"
            )


def _check_nobody_is_connected() -> None:
    """Raise BackupError while the platform runs: its processes would see half a database."""
    give_up_at = time.monotonic() + _GOING_S
    while found := _connected():
        if time.monotonic() > give_up_at:
            raise BackupError(
                f"other processes are connected to the database ({', '.join(found)}): stop them"
            )
        time.sleep(0.2)


def _connected() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(
            "select usename, count(*) from pg_stat_activity where datname = current_database() "
            "and backend_type = 'client backend' and pid <> pg_backend_pid() "
            "group by usename order by usename"
        )
        return [f"{count} of {user}" for user, count in cursor.fetchall()]


def _check_empty() -> None:
    if "tenants_tenant" in database.tables():
        with connection.cursor() as cursor:
            cursor.execute("select count(*) from tenants_tenant")
            (count,) = cursor.fetchone()
        if count:
            raise BackupError(f"the database has {count} tenants: --force replaces all that it has")
    first = next(iter(_keys()), None)
    if first is not None:
        raise BackupError(
            f"the bucket {settings.S3_BUCKET} has objects, as {first}: --force overwrites them"
        )


def _keys() -> list[str]:
    storage.ensure_bucket()
    return [stored.key for stored in storage.objects(PREFIX, most=1)]


def _check_migrations(manifest: Manifest) -> None:
    known = set(MigrationLoader(None).disk_migrations or {})
    replaced = [
        f"{app}.{name}"
        for app, names in manifest.migrations.items()
        for name in names
        if (app, name) not in known
    ]
    if replaced:
        raise BackupError(
            f"the backup is of a newer version: this one does not know the migration {replaced[0]}"
            f"{f' and {len(replaced) - 1} more' if replaced[1:] else ''}"
        )


def _put_objects(folder: BackupFolder, manifest: Manifest, say: Say) -> None:
    progress = _Progress("objects restored", manifest, say)
    with ObjectIndex.opened(folder.file(manifest.name, INDEX)) as index:
        for entry in index:
            writer = storage.ObjectWriter(entry.key)
            try:
                for piece in pieces_of(folder.object_file(entry.sha256)):
                    writer.write(piece)
                writer.finish()
            except BaseException:
                writer.abort()
                raise
            if storage.object_size(entry.key) != entry.num_bytes:
                raise BackupError(f"the store does not have all of {entry.key} after its upload")
            progress.add(entry.num_bytes)
    progress.end()


def _empty_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("set lock_timeout = '10s'")
        cursor.execute("drop schema public cascade")
        cursor.execute("create schema public authorization pg_database_owner")
        cursor.execute("grant usage on schema public to public")


def _check_counts(manifest: Manifest) -> None:
    found = database.count_rows()
    wrong = sorted(
        f"{table} has {found.get(table)} rows instead of {manifest.tables.get(table)}"
        for table in {*found, *manifest.tables}
        if found.get(table) != manifest.tables.get(table)
    )
    if wrong:
        raise BackupError("; ".join(wrong))
    applied = database.applied_migrations()
    if applied != manifest.migrations:
        raise BackupError(f"the applied migrations are not the manifest's: {json.dumps(applied)}")


class _Progress:
    """A reporter of the progress of a walk through the objects, every few seconds."""

    def __init__(self, what: str, manifest: Manifest, say: Say) -> None:
        self._what, self._totals, self._say = what, manifest.objects, say
        self._count = self._bytes = 0
        self._said_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._count += 1
        self._bytes += num_bytes
        if time.monotonic() - self._said_at > _PROGRESS_S:
            self.end()

    def end(self) -> None:
        self._said_at = time.monotonic()
        self._say(
            f"{self._what}: {self._count} of {self._totals['count']}, "
            f"{self._bytes / 2**20:,.1f} of {self._totals['bytes'] / 2**20:,.1f} MiB"
        )
