"""Measure a gateway process: milliseconds per request, and the most tokens per second.

    python -m bench.gateway [--streams 64] [--tokens 400] [--rounds 9] [--out FILE]

Web server, worker, Redis and PostgreSQL are real; the engine echoes. The client shares the
machine's cores with them. `latency` is the client's time for one token; `overhead` is that less the
time between acceptance and end that the worker recorded. `tokens_per_s` is the median of the
rounds: one round lasts under a second, and a single pause of Redis, the accountant or the client
moved the figure between 23,000 and 44,000. Prints a table, writes bench/results/gateway.json, and
exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from bench.machine import environment, write_result
from demo.stack import EmbeddedStack
from tests.fakes import FAKE_NAME
from tests.live import LiveStack, live_stack, wait_for

RESULTS = Path(__file__).parent / "results" / "gateway.json"
MIN_TOKENS_PER_S = 5000.0
MAX_OVERHEAD_P50_MS = 5.0
MAX_OVERHEAD_P99_MS = 25.0
WARM_UP = 30


@contextlib.contextmanager
def live_platform() -> Iterator[LiveStack]:
    """Run PostgreSQL, Redis, an object store and two tenants until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "live").mkdir()
        with EmbeddedStack(root / "stack", durable=False) as stack:
            with live_stack(stack.env, root / "live") as live:
                yield live


class Client:
    """A minimal client: one open connection, and no parsing except of lengths."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        )

    async def connect(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def post(self, **fields: object) -> tuple[str, bytes]:
        """Send a request; return its id and the body of the answer."""
        messages = [{"role": "user", "content": "the quick brown fox"}]
        body = json.dumps(
            {"model": FAKE_NAME, "messages": messages, "ignore_eos": True, **fields}
        ).encode()
        self._writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(head)
        if "content-length" in headers:
            answer = await self._reader.readexactly(int(headers["content-length"]))
        else:
            answer = await self._chunks()
        return headers["x-request-id"], answer

    async def _chunks(self) -> bytes:
        chunks = []
        while size := int(await self._reader.readline(), 16):
            chunks.append(await self._reader.readexactly(size))
            await self._reader.readline()
        await self._reader.readline()
        return b"".join(chunks)

    def close(self) -> None:
        self._writer.close()


async def one_by_one(url: str, key: str, requests: int) -> dict[str, float]:
    """Send single-token requests one after the other; return request id -> milliseconds."""
    client = await Client(url, key).connect()
    latencies = {}
    for _ in range(WARM_UP + requests):
        started = time.perf_counter()
        request_id, _ = await client.post(max_tokens=1)
        latencies[request_id] = (time.perf_counter() - started) * 1000
    client.close()
    return dict(list(latencies.items())[WARM_UP:])


async def all_at_once(url: str, key: str, streams: int, tokens: int) -> tuple[float, float]:
    """Return the seconds for `streams` concurrent streams, and the mean tokens per SSE event."""
    clients = [await Client(url, key).connect() for _ in range(streams)]
    options = {"max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    await asyncio.gather(*(client.post(**{**options, "max_tokens": 2}) for client in clients))
    started = time.perf_counter()
    answers = await asyncio.gather(*(client.post(**options) for client in clients))
    seconds = time.perf_counter() - started
    for client in clients:
        client.close()
    for _, answer in answers:
        if f'"completion_tokens":{tokens},'.encode() not in answer:
            raise RuntimeError(answer[-500:])
    events = sum(answer.count(b"\n\n") for _, answer in answers)
    return seconds, streams * tokens / events


def overheads(live: LiveStack, latencies: dict[str, float]) -> list[float]:
    """Return for each request the client's time beyond what the worker recorded."""

    def recorded() -> list[tuple[str, float]]:
        with psycopg.connect(live.database_url) as connection:
            rows = connection.execute(
                "select request_id, total_ms from inference_inferencerequest"
                " where request_id = any(%s)",
                (list(latencies),),
            ).fetchall()
        return rows if len(rows) == len(latencies) else []

    rows = wait_for(recorded, what="the usage of all requests")
    return [latencies[request_id] - total_ms for request_id, total_ms in rows]


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def measure(live: LiveStack, args: argparse.Namespace) -> dict[str, float]:
    _, url = live.start_web(DATABASE_POOL_SIZE="8")
    live.start_worker("bench", step_s=args.step_ms / 1000)
    live.start_accountant()
    key = live.tenants["acme"].key
    latencies = asyncio.run(one_by_one(url, key, args.requests))
    beyond = overheads(live, latencies)
    rounds = [
        asyncio.run(all_at_once(url, key, args.streams, args.tokens)) for _ in range(args.rounds)
    ]
    seconds = sorted(seconds for seconds, _ in rounds)
    return {
        "latency_p50_ms": percentile(list(latencies.values()), 0.5),
        "latency_p99_ms": percentile(list(latencies.values()), 0.99),
        "overhead_p50_ms": percentile(beyond, 0.5),
        "overhead_p99_ms": percentile(beyond, 0.99),
        "tokens_per_s": args.streams * args.tokens / statistics.median(seconds),
        "tokens_per_s_slowest": args.streams * args.tokens / seconds[-1],
        "tokens_per_s_fastest": args.streams * args.tokens / seconds[0],
        "tokens_per_event": statistics.median(per_event for _, per_event in rounds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure one gateway process.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--step-ms", type=float, default=0.5, help="of the echoing engine")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    result = environment("bench.gateway")
    with live_platform() as live:
        figures = measure(live, args)
    for name, value in figures.items():
        print(f"{name:20} {value:10.2f}")
    result |= {
        "streams": args.streams,
        "tokens": args.tokens,
        "rounds": args.rounds,
        **{name: round(value, 2) for name, value in figures.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, result)
    is_met = (
        figures["tokens_per_s"] >= MIN_TOKENS_PER_S
        and figures["overhead_p50_ms"] <= MAX_OVERHEAD_P50_MS
        and figures["overhead_p99_ms"] <= MAX_OVERHEAD_P99_MS
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
