"""The doctor names what is wrong and what to do, within seconds, whatever else is wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import requests
from django.core import mail as outbox
from django.db import connection

from contract.messages import protocol
from controlplane.adapters.models import BaseModel
from controlplane.infra import storage
from controlplane.infra.health import preflight
from controlplane.infra.mail import email_settings
from controlplane.maintenance.doctor import examination, machine, platform, servers
from controlplane.maintenance.doctor.examination import Finding, Status
from controlplane.tenancy.database.ownership import as_owner
from controlplane.tenants import auth
from demo.stack import EmbeddedStack
from tests.controlplane.conftest import Party
from tests.controlplane.maintenance.installation import Make
from tests.live import LiveStack


def statuses(findings: Iterator[Finding]) -> list[Status]:
    return [finding.status for finding in findings]


def messages(findings: Iterator[Finding]) -> str:
    return "; ".join(f"{finding.message} -> {finding.advice}" for finding in findings)


@contextlib.contextmanager
def server(*lines: bytes) -> Iterator[int]:
    """A port that accepts, and answers each line that it reads with the next of these."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listening.accept()
                    with contextlib.suppress(OSError):
                        for line in lines:
                            peer.sendall(line)
                            peer.recv(1000)
                    kept.append(peer)

        kept: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        for peer in kept:
            peer.close()


@pytest.fixture
def bucket_rules(settings: Any) -> Iterator[None]:
    """The bucket has no CORS rules: a platform of this lane may have set its own.

    Afterwards it has none again, as other tests' pages expect.
    """
    storage._internal().delete_bucket_cors(Bucket=settings.S3_BUCKET)
    yield
    storage._internal().delete_bucket_cors(Bucket=settings.S3_BUCKET)


def test_servers_of_the_tests_are_well(db: None, acme: Party, bucket_rules: None) -> None:
    assert preflight.allow_uploads() == ""
    checks = (servers.roles, servers.walls, servers.migrations, servers.queue, servers.broker)
    for check in (*checks, servers.store, servers.uploads, servers.clocks, machine.disks):
        assert set(statuses(check())) == {Status.OK}, messages(check())
    assert "PostgreSQL, Redis, S3" in messages(servers.clocks())


@pytest.mark.django_db(transaction=True)
def test_a_table_or_partition_without_its_policies_is_named() -> None:
    for table in ("tenants_apikey", "usage_usagerecord_other"):
        walls = 'alter table "{}" {} row level security'
        with as_owner(connection), connection.cursor() as cursor:
            cursor.execute(walls.format(table, "no force"))
        try:
            (finding,) = servers.walls()
        finally:
            with as_owner(connection), connection.cursor() as cursor:
                cursor.execute(walls.format(table, "force"))
        assert finding.status == Status.FAILURE
        assert finding.message.endswith(f" on {table}")


def test_a_check_that_fails_or_hangs_hurts_no_other() -> None:
    def fails() -> Iterator[Finding]:
        raise ValueError("broken\nand more")

    def hangs() -> Iterator[Finding]:
        time.sleep(30)
        yield examination.ok("late")

    def works() -> Iterator[Finding]:
        yield examination.ok("fine")

    began = time.monotonic()
    found = examination.examine([("hangs", hangs), ("fails", fails), ("works", works)], limit_s=0.5)
    assert time.monotonic() - began < 3
    assert [(f.check, f.status, f.message) for f in found] == [
        ("hangs", Status.FAILURE, "no answer within 0.5 s"),
        ("fails", Status.FAILURE, "broken"),
        ("works", Status.OK, "fine"),
    ]


def test_a_store_that_is_open_to_strangers_is_named(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "preflight/open"
    url = storage.presign_put(key, num_bytes=1)
    read = storage._internal().generate_presigned_url(
        "get_object", Params={"Bucket": settings.S3_BUCKET, "Key": key}
    )
    requests.put(url, data=b"x", timeout=5)
    get = requests.get
    # Anonymous rights cannot be given to this store's bucket: ask with rights instead.
    monkeypatch.setattr(servers.requests, "get", lambda url, **options: get(read, **options))
    assert "shows its objects and its list to everybody" in messages(servers.store())
    storage.delete([key])


def test_a_store_whose_public_address_is_wrong_is_named(settings: Any) -> None:
    settings.S3_PUBLIC_ENDPOINT_URL = "http://127.0.0.1:1"
    assert "http://127.0.0.1:1 does not answer here" in messages(servers.uploads())
    with server(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n") as port:
        settings.S3_PUBLIC_ENDPOINT_URL = f"http://127.0.0.1:{port}"
        found = messages(servers.uploads())
        assert "does not answer here" in found or "refuses a presigned upload: 403" in found


def test_a_bucket_without_our_rule_is_named_and_others_rules_stay(
    settings: Any, bucket_rules: None
) -> None:
    assert "let pages of all origins upload -> run `manage.py prepare`" in messages(
        servers.uploads()
    )
    other = {
        "ID": "other",
        "AllowedOrigins": ["https://other.example"],
        "AllowedMethods": ["GET"],
        "MaxAgeSeconds": 0,
    }
    storage._internal().put_bucket_cors(
        Bucket=settings.S3_BUCKET, CORSConfiguration={"CORSRules": [other]}
    )
    page = settings.BASE_URL
    found = messages(servers.uploads())
    assert f"do not let pages of {page}" in found and "https://stranger" not in found
    assert storage.cors_allow()
    assert not storage.cors_allow(), "a second call changes nothing"
    assert statuses(servers.uploads()) == [Status.OK]
    ours, kept = storage.cors_rules()
    assert kept == other
    assert ours["AllowedOrigins"] == storage.console_origins()
    assert ours["AllowedMethods"] == ["PUT", "GET", "HEAD"]
    settings.ALLOWED_HOSTS = [*settings.ALLOWED_HOSTS, "console.example", ".example.net", "*"]
    assert f"do not let pages of http://console.example:{urlsplit(page).port}, http://*.ex" in (
        messages(servers.uploads())
    )
    assert storage.cors_allow()
    assert statuses(servers.uploads()) == [Status.OK]
    assert len(storage.cors_rules()) == 2


def test_clocks_that_differ_are_named(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(servers.time, "time", lambda: now() - 10)
    assert "the clock of PostgreSQL is 10." in messages(servers.clocks())


def test_redis_that_forgets_is_named(stack: EmbeddedStack, settings: Any) -> None:
    with servers._redis(settings.REDIS_URL) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            found = messages(servers.queue())
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert "maxmemory-policy is 'allkeys-lru': Redis may drop accepted requests" in found
    assert "set `maxmemory-policy noeviction`" in found


def test_models_and_workers_that_are_missing_are_named(
    db: None, settings: Any, tmp_path: Path
) -> None:
    settings.POOL = "nobodys"
    assert "no base model is registered" in messages(platform.base_models())
    BaseModel.objects.create(name="tiny", revision="0" * 64, config={}, context_length=8)
    assert "registered: tiny" in messages(platform.base_models())
    settings.BASE_MODEL = str(tmp_path)
    assert f"{tmp_path} is no base model's folder" in messages(platform.base_models())
    assert "no worker of the pool nobodys serves tiny" in messages(platform.pool())
    found = messages(platform.processes())
    for name in ("accountant", "batch-runner", "beat"):
        assert f"{name} has not shown itself for a day -> see the log of {name}" in found


def test_a_base_that_quantisation_changes_too_much_is_named(settings: Any) -> None:
    settings.POOL = "quantised"
    settings.PRECISION_MAX_KL = 0.1
    kinds = {
        "all": {"kl": 0.0999, "agreement": 0.91, "logit_error": 2.5},
        "attention": {"kl": 0.01, "agreement": 0.99, "logit_error": 0.5},
        "mlp": {"kl": 0.07, "agreement": 0.93, "logit_error": 2.25},
        "kv": {"kl": 0.02, "agreement": 0.97, "logit_error": 1.0},
    }
    told = {"weights": "fp8", "kv": "fp8", "compared_with": "bfloat16", "kinds": kinds}
    with servers._redis(settings.REDIS_URL) as client:

        def beat(**fields: Any) -> None:
            heartbeat = protocol.Heartbeat(
                worker_id="w1", boot_id="b", pool="quantised", base_model="tiny",
                base_revision="0" * 64, device="cpu", **fields,
            )  # fmt: skip
            client.hset(protocol.worker_key("quantised", "w1"), "m", heartbeat.encode())
            client.zadd(protocol.workers_key("quantised"), {"w1": client.time()[0]})

        try:
            beat()
            assert not list(platform.precision())
            beat(precision=told)
            [finding] = platform.precision()
            assert finding.status == Status.OK
            assert finding.message.startswith(
                "w1, tiny in fp8, KV fp8, beside bfloat16: all KL 0.0999, top-1 91.0%, logit error "
                "2.5; attention KL 0.01,"
            )
            kinds["all"]["kl"] = 0.11
            beat(precision=told)
            [finding] = platform.precision()
            assert finding.status == Status.WARNING
            assert "LORIKEET_PRECISION_MAX_KL is 0.1" in finding.message
            assert "of the MLP's matrices" in finding.advice
        finally:
            client.delete(protocol.worker_key("quantised", "w1"))
            client.delete(protocol.workers_key("quantised"))


def test_a_wrong_or_weak_pepper_is_named(settings: Any, acme: Party) -> None:
    assert set(statuses(platform.pepper())) == {Status.OK}
    settings.API_KEY_PEPPER = settings.SECRET_KEY = "short"
    found = messages(platform.pepper())
    assert "LORIKEET_KEY_PEPPER is not the pepper of 1 stored keys" in found
    assert "LORIKEET_KEY_PEPPER is shorter than 32" in found
    assert "LORIKEET_SECRET_KEY is the pepper, too" in found
    auth._keys.forget(*auth._keys.keys())


def use_mail(settings: Any, url: str) -> None:
    for name, value in email_settings(url).items():
        setattr(settings, name, value)


def test_mail_that_cannot_be_sent_is_named(settings: Any, tmp_path: Path) -> None:
    use_mail(settings, "console:")
    assert statuses(machine.mail()) == [Status.WARNING]
    use_mail(settings, "smtp://127.0.0.1:1")
    assert "127.0.0.1:1 cannot be used: [Errno 111] Connection refused" in messages(machine.mail())
    hello, auth_line = b"220 here\r\n", b"250-here\r\n250 AUTH PLAIN LOGIN\r\n"
    with server(hello, auth_line, b"535 wrong password\r\n", b"535 wrong password\r\n") as port:
        use_mail(settings, f"smtp://user:wrong@127.0.0.1:{port}")
        assert "refuses the user or password" in messages(machine.mail())
    with server() as port:  # it never answers
        use_mail(settings, f"smtp://127.0.0.1:{port}")
        assert "cannot be used" in messages(machine.mail())
    use_mail(settings, "file:///proc/mail")
    assert "/proc/mail cannot be written" in messages(machine.mail())
    use_mail(settings, f"file://{tmp_path}/mail")
    assert statuses(machine.mail()) == [Status.OK]
    assert not (tmp_path / "mail").exists()
    assert "sent one to me@example.com" in messages(machine.mail("me@example.com"))
    [written] = (tmp_path / "mail").iterdir()
    assert "To: me@example.com" in written.read_text()
    assert outbox.outbox == []


def test_a_full_disk_is_named(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = machine.shutil.disk_usage("/")._replace(free=100 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: usage)
    assert "LORIKEET_WORK_DIR: 0.1 GiB free" in messages(machine.disks())
    assert set(statuses(machine.disks())) == {Status.FAILURE}


def test_addresses_that_disclose_keys_are_named(settings: Any) -> None:
    settings.BASE_URL = "http://lorikeet.example.org"
    assert "keys and passwords are not encrypted" in messages(machine.addresses())
    settings.BASE_URL = "https://lorikeet.example.org"
    settings.FORWARDED_ALLOW_IPS = "*"
    found = messages(machine.addresses())
    assert "browsers refuse to upload" in found
    assert "everybody can forge an address" in found


def test_everything_wrong_at_once_is_named_within_10_s(
    stack: EmbeddedStack, installed: Make, tmp_path: Path
) -> None:
    made = installed("sick")
    with psycopg.connect(made.env["DATABASE_OWNER_URL"]) as connection:
        connection.execute("alter table tenants_apikey no force row level security")
        connection.execute("delete from django_migrations where app = 'webhooks'")
    place = urlsplit(made.env["DATABASE_URL"])
    password = stack.secrets.postgres_password
    with server() as silent:  # accepts, and never answers
        made.env |= {
            "DATABASE_URL": f"postgresql://postgres:{password}@127.0.0.1:{place.port}{place.path}",
            "REDIS_URL": f"redis://127.0.0.1:{silent}/0",
            "CELERY_BROKER_URL": f"redis://:wrong@127.0.0.1:{stack.ports.redis}/0",
            "S3_SECRET_ACCESS_KEY": "wrong",
            "LORIKEET_BASE_MODEL": str(tmp_path),
        }
        assert "usage:" in made.manage("help", "doctor")  # Django is loaded
        began = time.monotonic()
        said = made.refused("doctor", "--json")
        assert time.monotonic() - began < 10
    report = json.loads(said.splitlines()[-1])
    assert report["status"] == "failure"
    found = {
        check: "; ".join(f["message"] for f in report["findings"] if f["check"] == check)
        for check in {f["check"] for f in report["findings"]}
    }
    assert "postgres is a superuser" in found["roles"]
    assert "no forced row-level security with all policies on tenants_apikey" in found["policies"]
    assert "the first is webhooks.0001_initial" in found["migrations"]
    assert "no answer within 3 s" in found["redis"] or "does not answer" in found["redis"]
    assert "CELERY_BROKER_URL: Redis refuses the password" in found["broker"]
    assert "S3_SECRET_ACCESS_KEY is not the one of S3_ACCESS_KEY_ID" in found["store"]
    assert "no base model" in found["models"]
    assert found["disks"]
    assert all(f["advice"] for f in report["findings"] if f["status"] != "ok")


@pytest.mark.long
def test_an_installation_that_runs_is_well(live: LiveStack) -> None:
    own = live.with_pool("doctor")
    own.env |= {
        "CELERY_BROKER_URL": live.env["REDIS_URL"].removesuffix("/5") + "/12",
        "EMAIL_URL": f"file://{live.folder}/mail",
    }
    celery = ("-m", "celery", "-A", "controlplane")
    own.start("doctor-celery", *celery, "worker", "-Q", "ingest,ops,train", "-P", "solo")
    beat = f"--schedule={live.folder}/beat"
    own.start("doctor-beat", *celery, "beat", beat, "--pidfile=", LORIKEET_SCHEDULE_TICK_S="1")
    own.start_worker("worker-0")
    own.start_accountant()
    own.start_batch_runner()

    def failures() -> list[str]:
        code = "import sys; from django.core.management import call_command as c\n"
        code += "try: c('doctor', json=True)\nexcept SystemExit: pass"
        report = json.loads(own.run("manage.py", "shell", "--no-imports", "-c", code))
        found = [f for f in report["findings"] if f["status"] == "failure"]
        return sorted(f["message"].rsplit(" ", 1)[0] for f in found)

    # The other models of these tests have no worker.
    unserved = ["no worker of the pool doctor serves"] * 3
    deadline = time.monotonic() + 60
    while failures() != unserved and time.monotonic() < deadline:
        time.sleep(1)
    assert failures() == unserved
