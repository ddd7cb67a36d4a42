"""The whole platform as the end-to-end tests see it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import openai
import psycopg
from psycopg.rows import dict_row

from demo.client import ManagementClient
from demo.platform import Platform
from demo.seed import last_json, manage
from demo.state import TenantState

T = TypeVar("T")


@dataclasses.dataclass(slots=True, kw_only=True)
class System:
    """A running platform with tenants acme and globex, an adapter each."""

    platform: Platform
    env: dict[str, str]
    tenants: dict[str, TenantState]
    database_url: str
    base_model: str
    base_config: dict[str, Any]

    @property
    def base_url(self) -> str:
        return self.platform.base_url

    def client(self, tenant: str = "acme", **options: Any) -> openai.OpenAI:
        """The official client with a tenant's key; it does not retry, so tests see every answer."""
        key = options.pop("api_key", self.tenants[tenant].api_key)
        return openai.OpenAI(
            base_url=f"{self.base_url}/v1", api_key=key, max_retries=0, timeout=120, **options
        )

    def management(self, tenant: str = "acme") -> ManagementClient:
        return ManagementClient(self.base_url, self.tenants[tenant].api_key)

    def api_key_create(self, tenant: str) -> dict[str, Any]:
        """{"public_id", "name", "key"}, made as an operator does at the command line."""
        argv = ["api_key_create", f"--tenant={tenant}", "--name=test", "--rotate"]
        return last_json(manage(self.env, *argv))

    def api_key_revoke(self, public_id: str) -> None:
        """As another process would: the web process is not told."""
        with psycopg.connect(self.database_url) as connection:
            connection.execute(
                "update tenants_apikey set revoked_at = now() where public_id = %s", (public_id,)
            )

    def usage(self, request_id: str) -> dict[str, Any] | None:
        """The usage record of a request, as it lies in Postgres."""
        rows = self.query("select * from usage_usagerecord where request_id = %s", request_id)
        assert len(rows) <= 1
        return rows[0] if rows else None

    def usage_soon(self, request_id: str, timeout_s: float = 20) -> dict[str, Any]:
        return until(lambda: self.usage(request_id), f"usage of {request_id}", timeout_s)

    def running_requests(self) -> int:
        """What the worker said in its last heartbeat."""
        heartbeat = self.platform.heartbeat()
        assert heartbeat is not None
        return heartbeat.running + heartbeat.waiting

    def query(self, text: str, *parameters: object) -> list[dict[str, Any]]:
        with psycopg.connect(self.database_url, row_factory=dict_row) as connection:
            return connection.execute(text.encode(), parameters).fetchall()

    def execute(self, text: str, *parameters: object) -> None:
        with psycopg.connect(self.database_url) as connection:
            connection.execute(text.encode(), parameters)


def until(probe: Callable[[], T | None], what: str, timeout_s: float = 20) -> T:
    """The first value of `probe` that is neither None nor false.

    What takes long is asked for less and less often, as each answer takes time of a processor.
    """
    give_up_at, pause_s = time.monotonic() + timeout_s, 0.05
    while time.monotonic() < give_up_at:
        if value := probe():
            return value
        time.sleep(pause_s)
        pause_s = min(1.05 * pause_s, 0.5)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def read_base_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
