"""Real processes for batches: a web server, a worker around an engine that echoes, a runner."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.fakes import FAKE_NAME
from tests.live import LiveStack, wait_for
from tests.site import Site

ENDPOINT = "/v1/chat/completions"


def chat_line(custom_id: str, text: str = "x", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": ENDPOINT,
        "body": {
            "model": FAKE_NAME,
            "messages": [{"role": "user", "content": text}],
            **body,
        },
    }


def as_file(lines: Iterable[Any]) -> bytes:
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


@dataclasses.dataclass(frozen=True)
class Batches:
    """What the tests do with batches over and over."""

    site: Site

    def create(self, lines: Iterable[Any], tenant: str = "acme", **fields: Any) -> Any:
        client = self.site.client(tenant)
        file = client.files.create(file=("in.jsonl", as_file(lines)), purpose="batch")
        fields = {"endpoint": ENDPOINT, "completion_window": "24h", **fields}
        return client.batches.create(input_file_id=file.id, **fields)

    def ended(self, batch: Any, tenant: str = "acme", timeout_s: float = 60.0) -> Any:
        """The batch once it has ended."""
        client = self.site.client(tenant)

        def look() -> Any:
            now = client.batches.retrieve(batch.id)
            return now if now.status in ("completed", "failed", "expired", "cancelled") else None

        return wait_for(look, timeout_s=timeout_s, what=f"the end of {batch.id}")

    def lines(self, file_id: str | None, tenant: str = "acme") -> list[dict[str, Any]]:
        """A file's lines; none of no file."""
        if file_id is None:
            return []
        content = self.site.client(tenant).files.content(file_id).text
        assert content.endswith("\n")
        return [json.loads(line) for line in content.splitlines()]

    def set(self, batch: Any, assignment: str) -> None:
        """Change the batch's row, behind everybody's back."""
        with self.site.database() as database:
            database.execute(
                f"update batches_batch set {assignment} where id = %s",  # type: ignore[arg-type]
                (batch.id.removeprefix("batch_"),),
            )


@pytest.fixture(scope="module")
def pool(live: LiveStack, request: pytest.FixtureRequest) -> LiveStack:
    """A pool for each module, so that none meets another's batches."""
    return live.with_pool(request.module.__name__.rpartition(".")[2].replace("_", "-"))


@pytest.fixture(scope="module")
def batches(pool: LiveStack) -> Iterator[Batches]:
    web, url = pool.start_web("batches-web", DATABASE_POOL_SIZE="4")
    yield Batches(Site(pool, url, web))
    web.stop()
