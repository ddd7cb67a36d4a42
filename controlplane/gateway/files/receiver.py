"""Stream uploaded files from the client's socket to the object store.

One part is in memory at a time, and nothing is written to disk. These two addresses have an ASGI
application of their own, because Django's handler writes the whole body to disk before a view runs:

    POST /v1/files                 multipart: file, purpose, expires_after[anchor|seconds]
    POST /v1/uploads/{id}/parts    multipart: data
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

from asgiref.sync import ThreadSensitiveContext
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse

from controlplane.errors import RateLimited, Unavailable
from controlplane.files.contents import MAX_FILE_BYTES
from controlplane.files.services import MAX_PART_BYTES
from controlplane.gateway.body_limit import Receive, Send
from controlplane.gateway.files import views
from controlplane.gateway.files.receiving import FORM_BYTES, MAX_BODIES, Body, Disconnected

#: Number of `MAX_BODIES` that one tenant may use: its slow clients do not block other tenants.
MAX_TENANT_BODIES = 8

_PATH = re.compile(r"/v1/(?:files|uploads/(?P<upload_id>[^/]+)/parts)")


def is_ours(scope: dict[str, Any]) -> bool:
    """Return whether a request uploads a file or a part."""
    return scope["method"] == "POST" and _PATH.fullmatch(scope["path"]) is not None


class FileReceiver:
    """The ASGI application of the two addresses above."""

    def __init__(self) -> None:
        self._bodies: Counter[uuid.UUID] = Counter()  # by tenant

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        match = _PATH.fullmatch(scope["path"])
        assert match is not None
        upload_id = match["upload_id"]
        is_part = upload_id is not None
        body = Body(receive, max_bytes=(MAX_PART_BYTES if is_part else MAX_FILE_BYTES) + FORM_BYTES)
        request = ASGIRequest(scope, None)  # type: ignore[arg-type]  # the body is read elsewhere
        with contextlib.suppress(Disconnected):
            async with ThreadSensitiveContext():
                if is_part:
                    response = await views.part_create(
                        request, body=body, place=self._place, upload_id=upload_id
                    )
                else:
                    response = await views.file_create(request, body=body, place=self._place)
            await _answer(cast(HttpResponse, response), body, send)

    @contextlib.asynccontextmanager
    async def _place(self, tenant_id: uuid.UUID) -> AsyncIterator[None]:
        """Hold one of the places for bodies. Raises RateLimited, Unavailable."""
        if self._bodies[tenant_id] >= MAX_TENANT_BODIES:
            raise RateLimited(
                f"{MAX_TENANT_BODIES} files of your organization arrive at this moment.",
                retry_after_s=5,
            )
        if self._bodies.total() >= MAX_BODIES:
            raise Unavailable("Too many files arrive at this moment.", retry_after_s=5)
        self._bodies[tenant_id] += 1
        try:
            yield
        finally:
            self._bodies[tenant_id] -= 1
            if not self._bodies[tenant_id]:
                del self._bodies[tenant_id]


async def _answer(response: HttpResponse, body: Body, send: Send) -> None:
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in response.items()]
    if response.status_code >= 400:
        headers.append((b"connection", b"close"))  # the rest of the body may be on its way
    start = {"type": "http.response.start", "status": response.status_code, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": response.content, "more_body": True})
    await body.drain()  # a connection that is closed over unread bytes may lose the answer
    await send({"type": "http.response.body"})
