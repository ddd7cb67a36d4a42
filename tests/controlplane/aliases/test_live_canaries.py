"""Canaries through the real gateway, queue, worker and accountant, with an echoing engine.

A planted bad one is rolled back within 200 of its requests, and no caller gets it a second later;
a good one stays.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psycopg
import pytest

from tests.live import LiveStack, wait_for

PERCENT = 50
NUM_AT_ONCE = 16


@pytest.fixture(scope="module")
def pool(live: LiveStack) -> Iterator[LiveStack]:
    pool = live.with_pool("canaries")
    pool.web, pool.url = pool.start_web("canaries-web")  # type: ignore[attr-defined]
    worker, accountant = pool.start_worker("canaries-worker"), pool.start_accountant()
    yield pool
    assert accountant.stop() == 0
    assert worker.stop() == 0
    pool.web.end()  # type: ignore[attr-defined]


class Traffic:
    """Callers of an alias, each by another name."""

    def __init__(self, pool: LiveStack, name: str, fails_percent: int) -> None:
        acme = pool.tenants["acme"]
        argv = ("tests.live_canary", acme.id, name, str(PERCENT), str(fails_percent))
        self.alias_id = pool.run("-m", *argv)
        self._pool, self._name = pool, name
        self._http = httpx.Client(
            base_url=pool.url,  # type: ignore[attr-defined]
            headers={"Authorization": f"Bearer {acme.key}"},
            timeout=60,
            limits=httpx.Limits(max_connections=NUM_AT_ONCE),
        )

    def ask(self, number: int) -> tuple[str, int]:
        """Which target answered a caller, and the status."""
        answer = self._http.post(
            "/v1/completions",
            json={"model": self._name, "prompt": "ab", "user": f"caller {number}", "max_tokens": 4},
        )
        return answer.headers.get("x-lorikeet-alias-target", "?"), answer.status_code

    def ask_all(self, numbers: range) -> Counter[tuple[str, int]]:
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            return Counter(threads.map(self.ask, numbers))

    def revision(self) -> tuple[int, int, str, str]:
        """Number, canary's percent, cause and reason of the current revision."""
        [row] = self._query(
            "select number, canary_percent, cause, reason from aliases_aliasrevision r join"
            " aliases_alias a on a.id = r.alias_id and a.revision_number = r.number where a.id = %s"
        )
        return row  # type: ignore[return-value]

    def counted(self) -> dict[str, tuple[int, int]]:
        """Requests and errors of each target in the first revision."""
        rows = self._query(
            "select target, requests, errors from aliases_targetcount c join"
            " aliases_aliasrevision r on r.id = c.revision_id and r.number = 1 where alias_id = %s"
        )
        return {str(target): (int(requests), int(errors)) for target, requests, errors in rows}  # type: ignore[call-overload]

    def _query(self, text: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self._pool.database_url) as connection:
            return connection.execute(text.encode(), (self.alias_id,)).fetchall()


def run_bad(pool: LiveStack, name: str) -> None:
    traffic = Traffic(pool, name, fails_percent=25)
    first = 0
    while traffic.revision()[0] == 1:
        assert first < 1500, traffic.counted()
        traffic.ask_all(range(first, first + 2 * NUM_AT_ONCE))
        first += 2 * NUM_AT_ONCE
    number, percent, cause, reason = traffic.revision()
    assert (number, percent, cause) == (2, 0, "canary_failed")
    judged = re.fullmatch(r"errors ([0-9.]+) % of (\d+) requests against 0\.0 % of .*", reason)
    assert judged is not None, reason
    assert int(judged[2]) <= 200
    # The gateway reads the clock of changes twice a second; a busy machine takes longer.
    everybody = Counter({("primary", 200): 100})
    wait_for(lambda: traffic.ask_all(range(100)) == everybody, what="the end of the canary")


def run_good(pool: LiveStack, name: str, most: int) -> None:
    traffic = Traffic(pool, name, fails_percent=0)
    told = traffic.ask_all(range(most))
    assert {status for _, status in told} == {200}

    def is_counted() -> bool:
        return sum(requests for requests, _ in traffic.counted().values()) == most

    wait_for(is_counted, what="the count of all requests")
    canary = traffic.counted()["canary"]
    assert canary == (told["canary", 200], 0)
    assert 0.3 * most < canary[0] < 0.7 * most
    time.sleep(0.5)
    assert traffic.revision()[:2] == (1, PERCENT)


def test_a_planted_bad_canary_is_rolled_back_within_200_requests(pool: LiveStack) -> None:
    run_bad(pool, "bad")


def test_a_good_canary_stays(pool: LiveStack) -> None:
    run_good(pool, "good", 250)


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_twenty_bad_and_twenty_good_canaries(pool: LiveStack, number: int) -> None:
    run_bad(pool, f"bad-{number}")
    run_good(pool, f"good-{number}", 500)
