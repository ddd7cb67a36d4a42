"""Measure how long a client waits for a refusal: milliseconds to the answer's first byte.

    python -m bench.refusals [--requests 300] [--out FILE]

Web server, worker, Redis and PostgreSQL are real; the engine echoes. One client sends requests over
one open connection, and shares the machine's cores with them. Every case is one reason for a
refusal, from a body that cannot be read to a prompt that only the worker finds too long. Prints a
line of JSON for each, writes bench/results/refusals.json, and exits with 1 if the median of any
case is over the bar.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.gateway import live_platform, percentile
from bench.machine import environment, write_result
from tests.fakes import FAKE_CONTEXT, FAKE_NAME
from tests.live import LiveStack

RESULTS = Path(__file__).parent / "results" / "refusals.json"
MAX_P50_MS = 10.0
WARM_UP = 30
#: The body of every case except those about the body.
PROMPT = {"prompt": "the quick brown fox", "max_tokens": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One reason for a refusal.

    key, body  of the nth request, or of all
    """

    name: str
    status: int
    code: str | None
    key: Callable[[int], str]
    body: Callable[[int], bytes]


class Connection:
    """One open connection to the gateway, with as little work of its own as possible."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._netloc = parts.netloc
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, key: str, body: bytes) -> tuple[float, int, Any]:
        """Send a request; return milliseconds to the answer's first byte, status and body."""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._netloc}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._socket.sendall(head.encode() + body)
        answer = self._receive()
        first_byte_ms = (time.perf_counter() - started) * 1000
        while not answer.endswith(b"\r\n0\r\n\r\n"):  # an answer of one chunk, and its end
            answer += self._receive()
        top, _, rest = answer.partition(b"\r\n\r\n")
        _, chunk, _ = rest.split(b"\r\n", 2)
        return first_byte_ms, int(top.split()[1]), json.loads(chunk)

    def _receive(self) -> bytes:
        if received := self._socket.recv(65536):
            return received
        raise ConnectionError("the gateway closed the connection")

    def close(self) -> None:
        self._socket.close()


def _says(**fields: object) -> Callable[[int], bytes]:
    """Return a function that gives the same body each time."""
    body = json.dumps({"model": FAKE_NAME, **PROMPT, **fields}).encode()
    return lambda at: body


def _new_name(at: int) -> bytes:
    return json.dumps({"model": f"nothing-{at}", **PROMPT}).encode()


def cases(live: LiveStack, keys: dict[str, Any]) -> list[Case]:
    """Return every case, the cheapest refusal first."""
    acme, globex = live.tenants["acme"], live.tenants["globex"]

    def case(
        name: str, status: int, code: str | None, body: Callable[[int], bytes], key: Any = acme.key
    ) -> Case:
        of_number = key if callable(key) else lambda at: key
        return Case(name=name, status=status, code=code, key=of_number, body=body)

    no_model = "model_not_found"
    return [
        case("malformed key", 401, "invalid_api_key", _says(), "lk_live_none"),
        case("malformed body", 400, None, lambda at: b'{"model": '),
        case("unknown field", 400, "unknown_parameter", _says(temprature=1)),
        case("bad value", 400, "invalid_value", _says(temperature=9)),
        case("missing scope", 403, "permission_denied", _says(), keys["narrow"]),
        case("unknown key", 401, "invalid_api_key", _says(), lambda at: keys["unknown"][at]),
        case("revoked key", 401, "invalid_api_key", _says(), acme.revoked_key),
        case("unknown model", 404, no_model, _new_name),
        case("unknown model, again", 404, no_model, _says(model="nothing")),
        case("unknown version", 404, no_model, _says(model=f"{acme.adapter}@9")),
        case("another tenant's model", 404, no_model, _says(model=globex.adapter)),
        case("unknown model, new key", 404, no_model, _new_name, lambda at: keys["fresh"][at]),
        case("no worker", 503, "overloaded", _says(model="unserved")),
        case("rate limit", 429, "rate_limit_exceeded", _says(), keys["limited"]),
        case("budget", 429, "insufficient_quota", _says(), keys["spent"]),
        case("long prompt", 400, "context_length_exceeded", _says(prompt="x " * FAKE_CONTEXT)),
    ]


def measure(url: str, case: Case, requests: int) -> dict[str, Any]:
    """Measure the requests after the first `WARM_UP`; raise RuntimeError for another answer."""
    connection = Connection(url)
    found = []
    for at in range(WARM_UP + requests):
        first_byte_ms, status, answer = connection.post(case.key(at), case.body(at))
        if at < WARM_UP:
            continue
        if (status, answer.get("error", {}).get("code")) != (case.status, case.code):
            raise RuntimeError(f"{case.name}: {status} {answer}")
        found.append(first_byte_ms)
    connection.close()
    return {
        "case": case.name,
        "status": case.status,
        "code": case.code,
        "p50_ms": round(percentile(found, 0.5), 2),
        "p99_ms": round(percentile(found, 0.99), 2),
    }


def make_keys(number: int) -> dict[str, Any]:
    """Make keys of each kind in the tenant acme; `number` of those that are used once."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    import django

    django.setup()

    from controlplane.tenancy.scoping import tenant_scope
    from controlplane.tenants import keys, services
    from controlplane.tenants.key_rules import KeyRules
    from controlplane.tenants.models import Tenant
    from controlplane.usage.limits.services import budget_set, rate_limit_set

    with tenant_scope(Tenant.objects.get(slug="acme").id):
        _, narrow = services.api_key_create(name="narrow", rules=KeyRules(scopes=("read",)))
        limited, limited_text = services.api_key_create(name="limited")
        rate_limit_set(api_key_id=limited.id, requests_per_minute=1)
        spent, spent_text = services.api_key_create(name="spent")
        budget_set(api_key_id=spent.id, hard_limit=1)
        fresh = [services.api_key_create(name=f"fresh {at}")[1] for at in range(number)]
    return {
        "narrow": narrow,
        "limited": limited_text,
        "spent": spent_text,
        "fresh": fresh,
        "unknown": [keys.generate().text() for _ in range(number)],
    }


def measure_all(live: LiveStack, requests: int) -> list[dict[str, Any]]:
    _, url = live.start_web(DATABASE_POOL_SIZE="8")
    live.start_worker("bench")
    live.start_accountant()
    keys = json.loads(live.run("-m", "bench.refusals", f"--seed={WARM_UP + requests}"))
    rows = []
    for case in cases(live, keys):
        rows.append(measure(url, case, requests))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how fast a gateway refuses.")
    parser.add_argument("--requests", type=int, default=300, help="of each case")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seed:
        print(json.dumps(make_keys(args.seed)))
        return 0
    result = environment("bench.refusals")
    with live_platform() as live:
        rows = measure_all(live, args.requests)
    result |= {"requests": args.requests, "max_p50_ms": MAX_P50_MS, "cases": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, result)
    return 0 if all(row["p50_ms"] <= MAX_P50_MS for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
