"""Measure the queue's scripts with many waiting tenants: microseconds inside Redis per call.

    python -m bench.queue [--tenants 5000] [--calls 3000] [--out FILE]

The times are Redis's own (INFO commandstats), so the client's time does not count, and other work
of the machine only where it interrupts Redis. Every admit checks a policy with all four limits and
a budget; every pull looks for adapters and takes one request. Prints a table, writes
bench/results/queue.json, and exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from bench.machine import environment, write_result
from contract.messages import protocol
from contract.messages.protocol import AdapterRef, GenerateJob
from contract.queue import fair_queue, scripts
from controlplane.usage.limits.admit import ADMIT, BudgetPeriod, Limits, Policy, admit_args
from demo.ports import HOST, choose_ports
from demo.servers import Redis

RESULTS = Path(__file__).parent / "results" / "queue.json"
MAX_US = 300.0
POOL, BASE, WORKER = "bench", "base", "w1"
DIGESTS = [f"{number:064x}" for number in range(1000)]
LIMITS = Limits(
    policies=(
        Policy(
            id="p",
            requests_per_minute=100_000,
            tokens_per_minute=100_000_000,
            max_concurrent=10_000,
            max_waiting=10_000,
        ),
    ),
    budgets=(
        BudgetPeriod(
            id="b",
            api_key_id=None,
            period="month",
            starts_at=0.0,
            ends_at=4e9,
            hard_limit=10**12,
            soft_limit=10**11,
        ),
    ),
)


def admit(client: Any, sha: str, number: int, tenants: int) -> None:
    tenant = f"tenant-{number % tenants:06}"
    digest = DIGESTS[number % len(DIGESTS)]
    ref = AdapterRef(digest=digest, config_key="c", tensors_key="t", num_bytes=1)
    job = GenerateJob(
        request_id=f"req_{number:032x}",
        tenant_id=tenant,
        api_key_id="k",
        gateway_id="g",
        model="m",
        base_model=BASE,
        adapters=(ref,),
        messages=({"role": "user", "content": "the quick brown fox " * 10},),
    )
    queue = fair_queue.queue_key(POOL, BASE)
    args = [
        *(POOL, queue, job.request_id, job.encode(), tenant, fair_queue.INTERACTIVE, digest),
        *(time.time() + 600, 3600, "g", 50, 100, 100, 1e9, 60, 10**6, 10**4),
        *admit_args(LIMITS, POOL, tenant),
    ]
    verdict = client.evalsha(sha, 1, protocol.job_key(POOL, job.request_id), *args)
    if verdict[0] != b"ok":
        raise RuntimeError(verdict)


def microseconds(client: Any) -> tuple[int, float]:
    """Return the number of script calls since the last reset, and their microseconds."""
    stats = client.info("commandstats")["cmdstat_evalsha"]
    return stats["calls"], stats["usec_per_call"]


def measure(client: Any, tenants: int, calls: int) -> dict[str, float]:
    sha = {name: client.script_load(text) for name, text in SCRIPTS.items()}
    for number in range(tenants):
        key = fair_queue.budget_key(POOL, f"tenant-{number:06}", "b", "0")
        client.hset(key, "spent", 0)
    for number in range(tenants * 2):
        admit(client, sha["admit"], number, tenants)
    client.sadd(fair_queue.residents_key(POOL, WORKER), *DIGESTS[::10])
    client.config_resetstat()
    for number in range(calls):
        admit(client, sha["admit"], tenants * 2 + number, tenants)
    admitted, admit_us = microseconds(client)
    figures = {"admit_us": admit_us, "admit_calls": float(admitted)}
    keys = [
        fair_queue.queue_key(POOL, BASE),
        protocol.inbox_key(POOL, WORKER),
        fair_queue.residents_key(POOL, WORKER),
    ]
    for count in (1, fair_queue.PULL_COUNT):
        client.config_resetstat()
        for _ in range(calls // count):
            pulled = client.evalsha(
                sha["pull"], 3, *keys, POOL, WORKER, "boot", count, protocol.INBOX_GROUP
            )
            if len(pulled) != count:
                raise RuntimeError(f"{len(pulled)} pulled")
        _, figures[f"pull_{count}_us"] = microseconds(client)
    return figures


SCRIPTS = {"admit": ADMIT, "pull": scripts.load("pull")}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the queue's scripts.")
    parser.add_argument("--tenants", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    result = environment("bench.queue")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        server = Redis(root, port=choose_ports(1)[0], run=root / "run")
        server.prepare()
        server.process.start()
        try:
            server.process.wait_until(server.is_ready, timeout_s=20)
            client = redis.Redis(host=HOST, port=server.port, protocol=2)
            figures = measure(client, args.tenants, args.calls)
        finally:
            server.process.stop()
    for name, value in figures.items():
        print(f"{name:14} {value:10.1f}")
    result |= {
        "tenants": args.tenants,
        **{name: round(value, 1) for name, value in figures.items()},
    }
    write_result(args.out, result)
    return 0 if all(figures[n] <= MAX_US for n in figures if n.endswith("_us")) else 1


if __name__ == "__main__":
    sys.exit(main())
