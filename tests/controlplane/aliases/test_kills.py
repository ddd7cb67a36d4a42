"""kill -9 of any process while an alias is switched: one revision is left, and it is whole.

Callers stream and people switch without a pause, while processes, PostgreSQL's backends and Redis
are killed at random moments. Requests and switches may fail then. But no answer has tokens of two
versions, what was answered to a switch is in the history, and in the end all gateways agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psycopg
import pytest

from demo.stack import EmbeddedStack
from tests.controlplane.aliases.test_switching import (
    NUM_TOKENS,
    SEED,
    TOKENS,
    World,
    ask,
    check_whole,
    letters_of,
)
from tests.live import LiveStack, Process, live_stack, wait_for
from tests.own_servers import OwnServers, own_servers

CELERY = ("-m", "celery", "-A", "controlplane")
#: What writes to aliases: a backend that serves something else proves nothing.
TERMINATE = """
select count(pg_terminate_backend(pid)) from (
    select pid from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid() and query ~ 'aliases_alias'
    order by random() limit 1
) as backend
"""


class Chaos:
    """A site with two gateways whose alias `prod` is switched all the time."""

    def __init__(self, pool: LiveStack, servers: OwnServers | None, folder: Path) -> None:
        pool.env["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
        self.pool, self._servers, self._folder = pool, servers, folder
        # A tenant of its own: other modules that share the servers have a `switched` of acme's.
        key = pool.run("-c", SEED, json.dumps(TOKENS), "killed").strip()
        self.world = World(pool, [], key)
        for index in range(2):
            self.world.gateways.append(self._gateway(index))
        self.processes = {"worker": self._start("worker")}
        self.letters = letters_of(self.world)
        body = {
            "name": "prod",
            "primary": {"adapter": "switched", "version": 1},
            "canary": {"adapter": "switched", "version": 2},
            "canary_percent": 50,
        }
        self.world.api("POST", "", body)
        self.mixed: list[tuple[int, set[str]]] = []
        self.seen: list[tuple[int, str, str]] = []  # revision, target, letter
        self.acknowledged: set[int] = set()
        self.num_whole = self.num_killed = 0
        self._stop = threading.Event()

    def add_the_rest(self) -> None:
        for name in ("accountant", "celery", "beat", "inspector"):
            self.processes[name] = self._start(name)

    def _gateway(self, index: int) -> tuple[Process, str]:
        return self.pool.start_web(f"kills-{index}", DATABASE_POOL_SIZE="4")

    def _start(self, name: str) -> Process:
        if name == "worker":
            self.pool.forget_worker("kills-worker")
            return self.pool.start_worker("kills-worker", step_s=0.005)
        if name == "accountant":
            return self.pool.start_accountant("kills-accountant")
        argv = {
            "celery": ("worker", "-Q", "ingest,ops", "-c", "1", "-n", "kills@%h"),
            "inspector": ("worker", "-Q", "inspect", "-c", "1", "-n", "kills-inspect@%h"),
            "beat": ("beat", f"--schedule={self._folder / 'beat'}", "--pidfile="),
        }
        return self.pool.start(f"kills-{name}", *CELERY, *argv[name])

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Callers, and a person at each gateway."""
        runs = [self._call] * 4 + [self._switch] * 2
        threads = [
            threading.Thread(target=run, args=(index,), daemon=True)
            for index, run in enumerate(runs)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)

    def _turns(self, work: Callable[[httpx.Client], None], pause_s: float, number: int) -> None:
        while not self._stop.is_set():
            url = self.world.gateways[number % 2][1]
            with (
                contextlib.suppress(httpx.HTTPError, json.JSONDecodeError),
                httpx.Client(base_url=url, headers=self.world.headers, timeout=15) as client,
            ):
                while not self._stop.is_set() and url == self.world.gateways[number % 2][1]:
                    work(client)
                    time.sleep(pause_s)
            time.sleep(0.05)

    def _call(self, number: int) -> None:
        drawn = random.Random(number)
        self._turns(lambda client: self._answer(client, f"caller {drawn.random()}"), 0.01, number)

    def _answer(self, client: httpx.Client, user: str) -> None:
        """Stream one answer, which may break off."""
        body = {"model": "prod", "user": user, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body |= {"messages": [{"role": "user", "content": "x"}], "stream": True}
        text, headers = "", httpx.Headers()
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    return
                headers = answer.headers
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:]).get("choices", ()):
                            text += choice["delta"].get("content") or ""
                    self.num_whole += line == "data: [DONE]"
        finally:
            if text:
                revision = int(headers["x-lorikeet-alias-revision"])
                self.seen.append((revision, headers["x-lorikeet-alias-target"], text[0]))
                if len(set(text)) != 1:
                    self.mixed.append((revision, set(text)))

    def _switch(self, number: int) -> None:
        drawn = random.Random(100 + number)

        def switch(client: httpx.Client) -> None:
            versions = drawn.sample((1, 2, 3), 2)
            primary, canary = ({"adapter": "switched", "version": one} for one in versions)
            method, path, body = drawn.choice(
                [
                    ("PATCH", "", {"primary": primary, "canary": canary, "canary_percent": 50}),
                    ("POST", "/ramp", {"percent": drawn.randint(1, 100)}),
                    ("POST", "/rollback", {}),
                ]
            )
            answer = client.request(method, f"/api/v1/aliases/prod{path}", json=body)
            if answer.status_code == 200:
                self.acknowledged.add(answer.json()["revision"])

        self._turns(switch, 0.05, number)

    # What is killed

    def kill(self, name: str) -> None:
        """Kill it, and start it again."""
        self.num_killed += 1
        if name.startswith("gateway"):
            index = int(name[-1])
            self.world.gateways[index][0].kill()
            if self._servers is None:  # the short test has no time for it
                self.world.gateways[index] = self.world.gateways[1 - index]
            else:
                self.world.gateways[index] = self._gateway(index)
        elif name == "backend":
            # As the application, whose backends they are.
            with psycopg.connect(self.pool.env["DATABASE_URL"]) as connection:
                row = connection.execute(TERMINATE).fetchone()
            self.num_killed -= row != (1,)
        elif name == "redis":
            assert self._servers is not None
            server = self._servers._redis
            assert server.process.pid is not None
            os.kill(server.process.pid, signal.SIGKILL)
            self._servers.stop_redis()
            self._servers.start_redis()
        else:
            self.processes[name].kill()
            self.processes[name].end()
            self.processes[name] = self._start(name)

    def check(self) -> None:
        """All gateways agree on one revision, which is whole and in the history."""

        def answers() -> bool:
            for _, url in self.world.gateways:
                with httpx.Client(base_url=url, headers=self.world.headers, timeout=20) as client:
                    try:
                        ask(client, "x", "prod")
                    except (AssertionError, httpx.HTTPError):
                        return False
            return True

        wait_for(answers, timeout_s=60, what="answers after the kills")
        check_whole(self.world, "prod", num_parts=2)
        assert self.mixed == []
        current = self.world.api("GET", "/prod")["revision"]
        assert max(self.acknowledged) <= current, "a switch that was answered is lost"
        query = (
            "select revision.number, part.target, part.number from aliases_aliaspart part "
            "join aliases_aliasrevision revision on revision.id = part.revision_id "
            "join aliases_alias alias on alias.id = revision.alias_id where alias.name = 'prod'"
        )
        versions = {(row[0], row[1]): row[2] for row in self.world.rows(query)}
        judged = [(versions[seen[:2]], seen[2]) for seen in self.seen if seen[:2] in versions]
        assert len(judged) > 5
        assert all(self.letters[version] == {letter} for version, letter in judged)
        assert self.num_whole > 5

    def end(self) -> None:
        for process in (*self.processes.values(), *(one for one, _ in self.world.gateways)):
            process.end()


def run(chaos: Chaos, victims: list[str], seed: int, pause_s: float) -> None:
    drawn = random.Random(seed)
    with chaos.load():
        for victim in victims:
            time.sleep(drawn.random() * pause_s)
            chaos.kill(victim)
        time.sleep(pause_s / 2)
    chaos.check()


@pytest.mark.alone
def test_a_few_kills_during_switches(live: LiveStack, tmp_path: Path) -> None:
    chaos = Chaos(live.with_pool("few-kills"), None, tmp_path)
    try:
        run(chaos, ["backend", "worker", "backend", "backend", "gateway-0"], 1, 0.3)
        assert chaos.num_killed >= 4
    finally:
        chaos.end()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_any_process_is_killed_during_switches(stack: EmbeddedStack, tmp_path: Path) -> None:
    kinds = ("gateway-0", "gateway-1", "worker", "accountant", "celery", "beat", "inspector")
    victims = [*kinds, "redis", *["backend"] * 5] * 3
    random.Random(18).shuffle(victims)
    with (
        own_servers(tmp_path, stack.env) as servers,
        live_stack({**stack.env, **servers.env}, tmp_path, database="lorikeet_kills") as live,
    ):
        chaos = Chaos(live, servers, tmp_path)
        chaos.add_the_rest()
        try:
            run(chaos, victims, 18, 1.5)
            assert chaos.num_killed >= len(victims) - 8
        finally:
            chaos.end()
