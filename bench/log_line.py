"""Measure what a request's log line costs: microseconds from the call to the written line.

    python -m bench.log_line [--lines 20000]

It writes the line of a streamed answer, with all its fields, in both formats to /dev/null, and for
comparison with the standard library's formatter, which has no fields. A streamed answer has one
such line in the gateway and one in the worker, however long it is.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from typing import Any

import structlog

from controlplane.infra.logs import logging_config

FIELDS: dict[str, Any] = {
    "request_id": "req_01a207dc6431715f89697b94937201e2",
    "client_request_id": "0af7651916cd43dd8448eb211c80319c",
    "tenant_id": "01a207dc-6431-715f-8969-7b94937201e2",
    "tenant": "acme",
    "caller": "key:Ab3dE6gHiJ",
    "method": "POST",
    "route": "/v1/chat/completions",
    "status": 200,
    "outcome": "ok",
    "duration_ms": 412.7,
    "model": "invoices",
    "stream": True,
    "queue_ms": 1.9,
    "prompt_tokens": 31,
    "cached_tokens": 16,
    "completion_tokens": 54,
    "first_token_ms": 60.2,
}


def formatters() -> dict[str, logging.Formatter]:
    made = {"plain": logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")}
    for log_format in ("console", "json"):
        line = logging_config(log_format, "INFO")["formatters"]["line"]
        made[log_format] = line["()"](processors=line["processors"])
    return made


def measure(formatter: logging.Formatter, lines: int) -> float:
    """Return microseconds per line; the best of five rounds."""
    log = logging.Logger("bench", "INFO")
    best = float("inf")
    with open(os.devnull, "w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        handler.setFormatter(formatter)
        log.addHandler(handler)
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(lines // 5):
                log.info("request", extra=FIELDS)
            best = min(best, (time.perf_counter() - began) / (lines // 5))
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=20_000)
    lines = parser.parse_args().lines
    structlog.contextvars.bind_contextvars(**{n: FIELDS[n] for n in list(FIELDS)[:5]})
    for name, formatter in formatters().items():
        print(f"{name:8} {measure(formatter, lines):7.1f} us a line")


if __name__ == "__main__":
    main()
