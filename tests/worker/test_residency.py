"""Adapters are where they are wanted before a request needs them: two workers, the real engine."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from contract.messages import protocol
from contract.messages.protocol import DoneRecord, Heartbeat, Tier
from tests.e2e.adapters import lora_tensors, write_adapter
from tests.live import LiveStack, wait_for
from tests.tiny_base import write_tiny_base

WORKERS = ("resident-1", "resident-2")
MESSAGES: list[Any] = [{"role": "user", "content": "hello, how are you?"}]


class Site:
    """A gateway, two workers, and an adapter of acme's with versions whose first is live."""

    def __init__(self, pool: LiveStack, folder: Path) -> None:
        self.pool = pool
        self.base = write_tiny_base(folder / "base")
        self.tenant = pool.tenants["acme"]
        self._config = json.loads((self.base / "config.json").read_text())
        self._folder = folder
        self._num_made = 0
        self.web, self.url = pool.start_web(LORIKEET_PREFETCH_WAIT_S="10")
        self.workers = {name: self.start(name) for name in WORKERS}

    def start(self, worker_id: str) -> Any:
        return self.pool.start_worker(worker_id, step_s=None, base=self.base)

    def add(self, name: str, count: int = 2) -> None:
        """An adapter with so many versions."""
        folders = []
        for _ in range(count):
            self._num_made += 1
            tensors = lora_tensors(self._config, seed=self._num_made)
            made = write_adapter(self._folder / f"made-{self._num_made}", tensors)
            folders.append(str(made))
        self.pool.run("-m", "tests.live_adapter", self.tenant.id, name, *folders)

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.tenant.key, max_retries=0)

    def call(self, method: str, path: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", method=method)
        request.add_header("Authorization", f"Bearer {self.tenant.key}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def counts(self, name: str, version: int) -> dict[str, int]:
        versions = self.call("GET", f"adapters/{name}/residency")["versions"]
        [found] = [row for row in versions if row["version"] == version]
        counts: dict[str, int] = found["counts"]
        return counts

    def ask(self, model: str, **options: Any) -> Any:
        """The headers of an answer."""
        chat = self.client.chat.completions.with_raw_response
        raw = chat.create(model=model, messages=MESSAGES, max_tokens=3, **options)
        if options.get("stream"):
            list(raw.parse())
        return raw.headers

    def record(self, request_id: str) -> DoneRecord:
        """The record of a request that has ended."""

        def find() -> DoneRecord | None:
            entries = self.pool.redis.xrange(protocol.done_key(self.pool.pool))
            records = [DoneRecord.decode(fields[protocol.PAYLOAD_FIELD]) for _, fields in entries]
            return next((one for one in records if one.request_id == request_id), None)

        found: DoneRecord = wait_for(find)
        return found

    def beat(self, worker_id: str) -> Heartbeat:
        found = self.pool.heartbeat(worker_id)
        assert found is not None
        return found

    def keep(self, name: str, *warmth: str) -> None:
        """Have aliases keep versions 1, 2, … so, and let the periodic task run once."""
        self.pool.run("-m", "tests.live_warmth", self.tenant.id, name, *warmth)


@pytest.fixture(scope="module")
def site(live: LiveStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(live.with_pool("resident"), tmp_path_factory.mktemp("resident"))
    yield made
    for worker in made.workers.values():
        assert worker.stop() == 0, worker.log.read_text()
    made.web.end()


def test_a_version_is_on_every_gpu_before_it_is_live(site: Site) -> None:
    site.add("switched")
    assert site.counts("switched", 2) == {"gpu": 0, "host": 0, "disk": 0, "cold": 2}
    answer = site.call("POST", "adapters/switched/versions/2/promote")
    assert answer["prefetched"] == {"workers": 2, "ready": 2}
    assert answer["live_version"] == 2
    assert site.counts("switched", 2) == {"gpu": 2, "host": 0, "disk": 0, "cold": 0}
    digest = site.call("GET", "adapters/switched/versions/2")["digest"]
    for stream in (False, True):
        headers = site.ask("switched", stream=stream)
        assert headers["x-lorikeet-version"] == "switched@2"
        assert headers["x-lorikeet-digest"] == digest
        assert headers["x-lorikeet-tier"] == "gpu"
        assert int(headers["x-lorikeet-queue-ms"]) >= 0
        record = site.record(headers["x-request-id"])
        assert (record.tier, record.digests) == ("gpu", (digest,))
        assert record.load_ms < record.total_ms / 2, "the first one loaded nothing"


def test_an_answer_says_where_its_adapter_was_found(site: Site) -> None:
    site.add("found", 1)
    assert site.ask("found@1", stream=True)["x-lorikeet-tier"] == "store"

    def is_known() -> bool:  # the one that answered says so
        return site.counts("found", 1)["gpu"] == 1

    wait_for(is_known)
    base = site.ask("tiny-llama")
    assert "x-lorikeet-tier" not in base and "x-lorikeet-version" not in base
    assert int(base["x-lorikeet-queue-ms"]) >= 0
    blend = site.client.chat.completions.with_raw_response.create(
        model="tiny-llama",
        messages=MESSAGES,
        max_tokens=3,
        extra_body={"adapters": [{"model": "found", "weight": 0.5}, {"model": "switched@2"}]},
    )
    assert blend.headers["x-lorikeet-version"] == "found@1,switched@2"
    assert len(blend.headers["x-lorikeet-digest"].split(",")) == 2
    assert blend.headers["x-lorikeet-tier"] in set(Tier)


def test_what_is_kept_warm_is_so_again_after_a_crash(site: Site) -> None:
    site.add("held")

    def is_kept() -> bool:
        pinned, warm = site.counts("held", 1), site.counts("held", 2)
        beats = [site.beat(name) for name in WORKERS]
        return pinned["gpu"] == 2 == warm["host"] and all(beat.pinned_digests for beat in beats)

    site.keep("held", "pinned", "warm")
    wait_for(is_kept, timeout_s=60)
    site.workers["resident-1"].kill()
    site.workers["resident-1"] = site.start("resident-1")
    assert site.counts("held", 1)["gpu"] < 2
    assert site.counts("held", 2)["disk"] == 1, "its disk was not lost"
    site.keep("held", "pinned", "warm")
    wait_for(is_kept, timeout_s=60)
    headers = site.ask("held-pinned")
    assert (headers["x-lorikeet-version"], headers["x-lorikeet-tier"]) == ("held@1", "gpu")
    assert site.ask("held-warm")["x-lorikeet-version"] == "held@2"


def test_workers_pass_over_what_they_do_not_understand(site: Site) -> None:
    for sent in (
        b'{"action":"dance","tempo":3}',
        b'{"action":"prefetch"}',
        b'{"action":"prefetch","adapter":{"digest":5}}',
        b'{"action":"prefetch","adapter":[1],"pin_s":"x"}',
        b"no json",
    ):
        for name in WORKERS:
            key = protocol.control_key(site.pool.pool, name)
            site.pool.redis.xadd(key, {protocol.PAYLOAD_FIELD: sent})
    site.add("after")
    answer = site.call("POST", "adapters/after/versions/2/promote")
    assert answer["prefetched"] == {"workers": 2, "ready": 2}
