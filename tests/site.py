"""A live web server as clients of /v1 see it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
from openai import OpenAI

from tests.live import ROOT, LiveStack, Process


@dataclasses.dataclass(frozen=True)
class Site:
    live: LiveStack
    url: str
    web: Process

    def client(self, tenant: str = "acme", **options: Any) -> OpenAI:
        key = options.pop("api_key", self.live.tenants[tenant].key)
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def send(self, method: str, path: str, tenant: str = "acme", **options: Any) -> httpx.Response:
        headers = {
            "Authorization": f"Bearer {self.live.tenants[tenant].key}",
            **options.pop("headers", {}),
        }
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **options)

    @contextlib.contextmanager
    def database(self) -> Iterator[psycopg.Connection[Any]]:
        """Every tenant's rows."""
        with psycopg.connect(self.live.database_url, autocommit=True) as connection:
            yield connection

    def run_python(self, code: str) -> str:
        """A piece of the control plane's code, as `manage.py shell` runs it; -> what it printed."""
        return self.live.run("manage.py", "shell", "--no-imports", "-c", code)

    @contextlib.contextmanager
    def talk_to_python(self, code: str) -> Iterator[subprocess.Popen[str]]:
        """The same, that may be talked to while it runs; killed in the end."""
        process = subprocess.Popen(
            [sys.executable, "manage.py", "shell", "--no-imports", "-c", code],
            env={**os.environ, **self.live.env},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
