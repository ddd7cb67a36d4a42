"""The gateway that also tells what it holds, for `python -m controlplane.serve`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

#: Where it tells.
HELD = "/_held"


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    # Here, for tests that want no more than the address.
    from controlplane import asgi
    from controlplane.queue.dispatcher import running_dispatcher

    if scope["type"] != "http" or scope["path"] != HELD:
        await asgi.application(scope, receive, send)
        return
    dispatcher = running_dispatcher()
    num_replies = 0 if dispatcher is None else len(dispatcher.replies)
    held = {"replies": num_replies, "tasks": len(asyncio.all_tasks())}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(held).encode()})
