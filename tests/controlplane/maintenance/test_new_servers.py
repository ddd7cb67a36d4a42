"""All servers are lost; with the backup and the pepper, a key of before gets its adapter's answer.

Then the new store gets another key.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis

from demo import servers
from demo.stack import BUCKET, EmbeddedStack
from tests.database import operator_url
from tests.live import LiveStack, live_stack, wait_for

pytestmark = pytest.mark.long

COUNTS = {
    table: f"select count(*) from {table}"
    for table in (
        "tenants_tenant",
        "tenants_apikey",
        "adapters_adapterversion",
        "usage_usagerecord",
    )
}


def chat(url: str, key: str, model: str) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
        timeout=60,
    )


def counts(url: str) -> dict[str, Any]:
    with psycopg.connect(url) as connection:
        found = {}
        for table, query in COUNTS.items():
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            found[table] = row[0]
        return found


def moved(live: LiveStack, stack: EmbeddedStack, folder: Path) -> LiveStack:
    """The same installation on other servers, of which it knows the pepper alone."""
    folder.mkdir()
    other = copy.copy(live)
    pepper = live.env["LORIKEET_KEY_PEPPER"]
    other.env = {**live.env, **stack.env, "LORIKEET_KEY_PEPPER": pepper}
    other.folder = folder
    other.redis_url = stack.env["REDIS_URL"]
    other.redis = redis.Redis.from_url(other.redis_url, protocol=2)
    other.database_url = operator_url(stack.env["DATABASE_URL"])
    other._processes = []
    return other


def change_store_key(stack: EmbeddedStack) -> dict[str, str]:
    """Restart the store with another key. -> the settings of it."""
    stack._s3.process.stop()
    key = {"S3_ACCESS_KEY_ID": "ANOTHERKEY", "S3_SECRET_ACCESS_KEY": "another secret of it"}
    ports = stack.ports
    stack._s3 = servers.SeaweedFS(
        stack.folder,
        master_port=ports.s3_master,
        volume_port=ports.s3_volume,
        filer_port=ports.s3_filer,
        s3_port=ports.s3,
        access_key_id=key["S3_ACCESS_KEY_ID"],
        secret_access_key=key["S3_SECRET_ACCESS_KEY"],
        run=stack.run,
    )
    stack._s3.prepare()
    stack._s3.process.start()
    stack._s3.process.wait_until(lambda: stack._s3.ensure_bucket(BUCKET), timeout_s=60, step_s=0.2)
    return key


@pytest.mark.timeout(600)
def test_new_servers_and_a_new_store_key(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    with (
        EmbeddedStack(tmp_path / "old", durable=False) as old,
        live_stack(old.env, tmp_path / "before", database="lorikeet_before") as live,
    ):
        acme = live.tenants["acme"]
        _, url = live.start_web()
        live.start_worker("worker-0")
        live.start_accountant()
        answer = chat(url, acme.key, acme.adapter)
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]["content"]
        live.usage_row(answer.headers["x-request-id"])
        # The platform runs while the backup is made.
        live.run("manage.py", "backup", str(backup))
        before = counts(live.database_url)
    shutil.rmtree(tmp_path / "old")

    with EmbeddedStack(tmp_path / "new", durable=False) as new:
        again = moved(live, new, tmp_path / "after")
        again.run("manage.py", "restore", str(backup))
        assert counts(again.database_url) == before
        assert json.loads(again.run("manage.py", "verify_audit"))["faults"] == {}
        try:
            web, url = again.start_web()
            worker = again.start_worker("worker-0")
            answer = chat(url, acme.key, acme.adapter)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == said
            assert chat(url, acme.revoked_key, acme.adapter).status_code == 401

            again.env |= change_store_key(new)
            # Until they know the new key, only what the worker has on its disk answers.
            assert chat(url, acme.key, acme.adapter).status_code == 200
            assert chat(url, acme.key, "acme-second").status_code == 503
            web.stop()
            worker.stop()
            _, url = again.start_web()
            again.start_worker("worker-0")
            for model in (acme.adapter, "acme-second"):
                answered = wait_for(
                    lambda model=model: chat(url, acme.key, model).status_code == 200,
                    what=f"an answer of {model}",
                )
                assert answered
        finally:
            again.close()
