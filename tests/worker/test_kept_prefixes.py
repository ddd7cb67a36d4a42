"""The system prompt of a pinned alias stays computed: a real engine, worker, gateway and task."""

from __future__ import annotations

import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from demo.ports import choose_ports
from tests.live import LiveStack, wait_for
from tests.worker.test_residency import Site

#: Of the tiny base's 512 tokens; its letters are tokens of their own.
PROMPT = "You sort letters into folders, and say why. " * 6
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


class OneWorker(Site):
    """Its engine has 160 pages of 16 tokens, of which prefixes get 40, one tenant 20."""

    def start(self, worker_id: str) -> Any:
        if worker_id != "resident-1":
            return None
        [self.port] = choose_ports(1)
        return self.pool.start_worker(
            worker_id,
            step_s=None,
            base=self.base,
            LORIKEET_ARENA_BYTES=str(160 * 2 * 2 * 16 * 16 * 4),
            LORIKEET_METRICS_PORT=str(self.port),
        )

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        [value] = [line.removeprefix(name) for line in lines if line.startswith(f"{name} ")]
        return float(value)

    def usage(self, model: str, messages: list[Any] = MESSAGES) -> Any:
        chat = self.client.chat.completions
        return chat.create(model=model, messages=messages, max_tokens=1).usage

    def cached(self, model: str) -> int:
        return int(self.usage(model).prompt_tokens_details.cached_tokens)

    def press(self) -> None:
        """Fill the arena with other prompts."""
        for _ in range(8):
            self.usage("tiny-llama", [{"role": "user", "content": uuid.uuid4().hex * 11}])

    def turn(self, *actions: str) -> str:
        """Change aliases, then let the periodic task run once."""
        return self.pool.run("-m", "tests.live_prefixes", self.tenant.id, *actions)

    def names(self) -> tuple[str, ...]:
        return self.beat("resident-1").kept_prefixes


@pytest.fixture(scope="module")
def site(live: LiveStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneWorker]:
    made = OneWorker(live.with_pool("prefixes"), tmp_path_factory.mktemp("prefixes"))
    made.add("sorted", 2)
    yield made
    assert made.workers["resident-1"].stop() == 0
    made.web.end()


def test_the_prompt_of_an_alias_stays_computed(site: OneWorker) -> None:
    site.turn(f"kept:pinned:{PROMPT}", f"cold:cold:{PROMPT[::-1]}")
    wait_for(lambda: len(site.names()) == 1, timeout_s=60)
    first = site.names()
    site.press()
    assert site.cached("cold") == 0, "the ordinary cache was evicted"
    usage = site.usage("kept")
    own = usage.prompt_tokens - len("hello") - 30  # the user's turn, and the last page
    assert own <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens > 200
    site.turn()  # the lease is renewed without the text
    assert site.names() == first

    new = "Now you sort parcels; letters go to a colleague. " * 5
    site.turn(f"kept:warm:{new}")
    wait_for(lambda: len(site.names()) == 1 and site.names() != first, timeout_s=60)
    site.press()
    assert site.cached("kept") > 150
    site.turn(f"kept:pinned:{PROMPT}", "kept:cold:")
    wait_for(lambda: site.names() == (), timeout_s=60)
    site.press()
    assert site.cached("kept") == 0, "what nobody wants is let go"


@pytest.mark.long
def test_one_tenant_has_half_of_the_pages(site: OneWorker) -> None:
    """Five are wanted, four are asked for, and of these the pages hold only so many."""
    site.turn(*(f"many-{i}:pinned:{i} {PROMPT[:250]}" for i in range(5)))
    wait_for(lambda: len(site.names()) > 0, timeout_s=60)
    site.turn()
    held = site.metric('lorikeet_pages{use="pinned"}')
    assert 0 < len(site.names()) < 4
    assert 0 < held <= 20
    assert site.metric('lorikeet_prefix_pins_total{outcome="kept"}') >= 4
    site.turn(*(f"many-{i}:cold:" for i in range(5)))

    def is_all_gone() -> bool:  # those that had no room are computed first, now that there is some
        site.turn()
        return site.names() == ()

    wait_for(is_all_gone, timeout_s=60)
