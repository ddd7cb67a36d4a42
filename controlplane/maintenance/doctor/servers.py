"""Check PostgreSQL, Redis and the object store."""

from __future__ import annotations

import datetime as dt
import email.utils
import time
import uuid
from collections.abc import Iterator
from typing import Any

import redis
import requests
from django.apps import apps
from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from controlplane.infra import storage
from controlplane.infra.health import preflight
from controlplane.maintenance.doctor.examination import Finding, failure, ok, warning
from controlplane.tenancy.scope import OPERATOR_ROLE
from controlplane.tenancy.scoping import TenantModel

#: A larger difference between two clocks is a warning.
MAX_SKEW_S = 2.0
_ANSWER_S = 2.0
_TENTH = 10


def roles() -> Iterator[Finding]:
    """Check that the application's role cannot pass the walls between tenants."""
    preflight.check_database("the application", settings.DATABASES["default"])
    with connection.cursor() as cursor:
        cursor.execute(
            "select rolsuper, rolbypassrls, rolinherit from pg_roles where rolname = current_user"
        )
        is_superuser, bypasses, inherits = cursor.fetchone()
        cursor.execute("select count(*) from pg_class where relowner = current_user::regrole")
        (owned,) = cursor.fetchone()
        cursor.execute("select count(*) from pg_roles where rolname = %s", [OPERATOR_ROLE])
        (operators,) = cursor.fetchone()
    role = settings.DATABASE_APPLICATION_ROLE
    make = "connect as a role that deploy/postgres.sh makes (docs/operations.md, roles)"
    if is_superuser or bypasses:
        what = "is a superuser" if is_superuser else "has BYPASSRLS"
        yield failure(f"{role} {what}: row-level security does not apply to it", make)
    elif owned:
        yield warning(f"{role} owns {owned} tables or indexes: it can change their policies", make)
    elif inherits:
        yield warning(
            f"{role} inherits the rights of {OPERATOR_ROLE}", f"alter role {role} noinherit"
        )
    else:
        yield ok(f"{role} is not a superuser and owns nothing")
    if not operators:
        yield failure(f"there is no role {OPERATOR_ROLE}", make)


def walls() -> Iterator[Finding]:
    """Check that all tenant tables and their partitions have forced row-level security."""
    tables = {model._meta.db_table for model in apps.get_models() if issubclass(model, TenantModel)}
    with connection.cursor() as cursor:
        cursor.execute(
            "select relname, relrowsecurity and relforcerowsecurity, (select count(*) from "
            "pg_policy where polrelid = pg_class.oid) from pg_class "
            "where relnamespace = 'public'::regnamespace and (relname = any (%s) or oid in "
            "(select inhrelid from pg_inherits where inhparent = any (select oid from pg_class "
            "where relkind = 'p' and relname = any (%s))))",
            [sorted(tables)] * 2,
        )
        found = {name: is_forced and policies >= 5 for name, is_forced, policies in cursor}
    open_ = sorted(table for table in tables | set(found) if not found.get(table))
    if open_:
        yield failure(
            f"no forced row-level security with all policies on {', '.join(open_[:5])}"
            + (f" and {len(open_) - 5} more" if open_[5:] else ""),
            "run `manage.py migrate` as the owner; if that changes nothing, restore the policies "
            "from controlplane/tenancy/database/operations.py",
        )
    else:
        yield ok(f"all {len(found)} tenant tables are behind forced policies")


def migrations() -> Iterator[Finding]:
    executor = MigrationExecutor(connection)
    pending = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if pending:
        first = pending[0][0]
        yield failure(
            f"{len(pending)} migrations are not applied, the first is {first}",
            "run `manage.py migrate` (in Compose: docker compose up migrate)",
        )
    else:
        yield ok("all migrations are applied")


def queue() -> Iterator[Finding]:
    """Check that Redis keeps accepted requests; see docs/operations.md, Redis."""
    preflight.check_redis("REDIS_URL", settings.REDIS_URL)
    with _redis(settings.REDIS_URL) as client:
        given: dict[str, str] = {}
        for name in ("appendonly", "maxmemory-policy", "aof-use-rdb-preamble", "save"):
            given |= client.config_get(name)
        wanted = {
            "appendonly": ("yes", "a restart loses accepted requests"),
            "maxmemory-policy": ("noeviction", "Redis may drop accepted requests"),
            "aof-use-rdb-preamble": ("no", "prompts stay in its file after their requests"),
            "save": ("", "snapshots keep prompts after their requests"),
        }
        wrong = False
        for name, (value, why) in wanted.items():
            if given.get(name) != value:
                wrong = True
                say = warning if name == "save" else failure
                yield say(
                    f"{name} is {given.get(name)!r}: {why}",
                    f"set `{name} {value or chr(34) * 2}` in Redis's configuration",
                )
        info: Any = client.info()
        if (
            info.get("aof_last_write_status") != "ok"
            or info.get("aof_last_bgrewrite_status") != "ok"
        ):
            wrong = True
            yield failure("Redis cannot write its file", "see its log; its disk may be full")
        most = int(info.get("maxmemory") or 0)
        if most and int(info["used_memory"]) > most * 8 // _TENTH:
            wrong = True
            yield warning(
                f"Redis uses {info['used_memory_human']} of {info['maxmemory_human']}",
                "give it more memory (REDIS_MEMORY in Compose): when it is full, requests get 503",
            )
        if not wrong:
            yield ok(f"Redis {info['redis_version']} keeps what it accepts")


def broker() -> Iterator[Finding]:
    preflight.check_redis("CELERY_BROKER_URL", settings.CELERY_BROKER_URL)
    with _redis(settings.CELERY_BROKER_URL) as client:
        waiting = {name: client.llen(name) for name in ("ingest", "ops", "train")}
    if waiting["ops"] > 1000:
        yield warning(f"{waiting['ops']} tasks wait in `ops`", "check that Celery runs")
    else:
        yield ok("tasks waiting: " + ", ".join(f"{name} {n}" for name, n in waiting.items()))


def store() -> Iterator[Finding]:
    """Check that the object store takes and returns bytes, and shows strangers nothing."""
    preflight.check_store(patience_s=_ANSWER_S)
    key = f"preflight/{uuid.uuid4().hex}"
    storage.put_bytes(key, b"lorikeet")
    try:
        address = f"{settings.S3_ENDPOINT_URL}/{settings.S3_BUCKET}"
        shown = [
            what
            for what, url in (("its objects", f"{address}/{key}"), ("its list", f"{address}/"))
            if requests.get(url, timeout=_ANSWER_S).ok
        ]
        if shown:
            yield failure(
                f"the bucket {settings.S3_BUCKET} shows {' and '.join(shown)} to everybody",
                "remove public rights from the bucket, and anonymous ones from the store",
            )
        else:
            yield ok(f"bucket {settings.S3_BUCKET}: written, read, and closed to strangers")
    finally:
        storage.delete([key])


def uploads() -> Iterator[Finding]:
    """Check that a presigned URL works, and that the console's pages may use it."""
    public = settings.S3_PUBLIC_ENDPOINT_URL
    key = f"preflight/{uuid.uuid4().hex}"
    url = storage.presign_put(key, num_bytes=8, expires_s=60)
    try:
        answer = requests.put(url, data=b"lorikeet", timeout=_ANSWER_S)
        refused = [page for page in storage.console_origins() if not _may_upload(url, page)]
        strangers = _may_upload(url, "https://stranger.invalid")
    except requests.RequestException:
        yield warning(
            f"{public} does not answer here; clients must reach it",
            "open it on a client's machine; S3_PUBLIC_ENDPOINT_URL is the address for clients",
        )
        return
    if not answer.ok:
        yield failure(
            f"{public} refuses a presigned upload: {answer.status_code} {answer.text[:200]}",
            "its proxy must pass on the Host header, the path and the query unchanged",
        )
        return
    storage.delete([key])
    advice = "run `manage.py prepare`, which sets the bucket's CORS rules (docs/deploy.md, CORS)"
    pages = ", ".join(refused or storage.console_origins())
    if refused:
        yield failure(f"the bucket's CORS rules do not let pages of {pages} upload", advice)
    elif strangers:
        yield warning("the bucket's CORS rules let pages of all origins upload", advice)
    else:
        yield ok(f"presigned uploads to {public} work, also from pages of {pages}")


def _may_upload(url: str, origin: str) -> bool:
    """Return whether a browser would send a part from a page of this origin."""
    asked = {
        "Origin": origin.replace("*.", "any."),
        "Access-Control-Request-Method": "PUT",
        "Access-Control-Request-Headers": "x-amz-checksum-sha256",
    }
    answer = requests.options(url, headers=asked, timeout=_ANSWER_S)
    allowed = answer.headers.get("Access-Control-Allow-Origin", "")
    headers = answer.headers.get("Access-Control-Allow-Headers", "").lower()
    takes = "*" in headers or "x-amz-checksum-sha256" in headers
    return takes and allowed in ("*", asked["Origin"])


def clocks() -> Iterator[Finding]:
    """Check that the servers' clocks agree with this machine's."""
    skews = []
    with connection.cursor() as cursor:
        cursor.execute("select 1")  # connect before the time is taken
        cursor.fetchone()
        began = time.time()
        cursor.execute("select extract(epoch from clock_timestamp())::float8")
        skews.append(("PostgreSQL", cursor.fetchone()[0] - _middle(began)))
    with _redis(settings.REDIS_URL) as client:
        client.ping()
        began = time.time()
        seconds, microseconds = client.time()
        skews.append(("Redis", seconds + microseconds / 1e6 - _middle(began)))
    began = time.time()
    answer = requests.get(settings.S3_ENDPOINT_URL, timeout=_ANSWER_S)
    if date := answer.headers.get("Date"):
        told = email.utils.parsedate_to_datetime(date).replace(tzinfo=dt.UTC).timestamp()
        # The header has whole seconds.
        skews.append(("S3", told + 0.5 - _middle(began)))
    late = [(name, skew) for name, skew in skews if abs(skew) > MAX_SKEW_S]
    for name, skew in late:
        yield warning(
            f"the clock of {name} is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}",
            "synchronize the machines' clocks (chrony or systemd-timesyncd)",
        )
    if not late:
        yield ok(f"clocks agree within {MAX_SKEW_S:g} s: {', '.join(name for name, _ in skews)}")


def _middle(began: float) -> float:
    return (began + time.time()) / 2


def _redis(url: str) -> Any:
    return redis.Redis.from_url(
        url,
        protocol=2,
        decode_responses=True,
        socket_timeout=_ANSWER_S,
        socket_connect_timeout=_ANSWER_S,
    )
