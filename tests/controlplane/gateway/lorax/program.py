"""Runs lorax-client for a test: JSON lines in, JSON lines out. Needs nothing but lorax-client.

in   {"kind": "sync" or "async", "call": "generate", "url": …, "headers": {…}, "arguments": {…}}
     {"call": "parse_error", "status": 422, "body": {…}}
out  {"result": …} or {"error": the exception's class, "message": …}
"""

import asyncio
import json
import sys
from typing import Any

from lorax import AsyncClient, Client
from lorax.errors import parse_error
from lorax.types import MergedAdapters


def arguments_of(request: Any) -> Any:
    arguments = dict(request["arguments"])
    if merged := arguments.get("merged_adapters"):
        arguments["merged_adapters"] = MergedAdapters(**merged)
    return arguments


def run_sync(request: Any) -> Any:
    client = Client(request["url"], headers=request["headers"])
    found = getattr(client, request["call"])(**arguments_of(request))
    if request["call"] == "generate_stream":
        return [event.model_dump(mode="json") for event in found]
    return found.model_dump(mode="json")


async def run_async(request: Any) -> Any:
    client = AsyncClient(request["url"], headers=request["headers"])
    found = getattr(client, request["call"])(**arguments_of(request))
    if request["call"] == "generate_stream":
        return [event.model_dump(mode="json") async for event in found]
    return (await found).model_dump(mode="json")


def answer(request: Any) -> Any:
    try:
        if request["call"] == "parse_error":
            raise parse_error(request["status"], request["body"])
        if request["kind"] == "async":
            return {"result": asyncio.run(run_async(request))}
        return {"result": run_sync(request)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


for line in sys.stdin:
    sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
    sys.stdout.flush()
