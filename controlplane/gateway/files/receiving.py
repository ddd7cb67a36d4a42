"""Read a file from a multipart form while the request's body arrives.

Django's parser reads the form, in a thread that waits for the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.core.files.uploadhandler import FileUploadHandler
from django.http import HttpRequest, QueryDict
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from controlplane.errors import ApiError, InvalidRequest, PayloadTooLarge
from controlplane.files.contents import MAX_FILE_BYTES, FileWriter
from controlplane.gateway.body_limit import Receive
from controlplane.infra.web.threads import query_in_thread

#: Bodies that one process receives at a time; each has a thread and one part in memory.
MAX_BODIES = 16
#: Threads that wait for the object store only: reads, and uploads that are completed.
_MAX_READS = 16
#: A client that sends nothing for this long is disconnected.
SILENCE_S = 60.0
#: Allowed for the form around the file.
FORM_BYTES = 1024**2
#: This much of a refused body is read: most clients read the answer only after they sent all.
_DRAIN_BYTES = 1024**2
_DRAIN_S = 2.0

_T = TypeVar("_T")
_body_threads = ThreadPoolExecutor(MAX_BODIES, thread_name_prefix="file-bodies")
_read_threads = ThreadPoolExecutor(_MAX_READS, thread_name_prefix="files")


async def in_file_thread(work: Callable[[], _T], *, reads_body: bool = False) -> _T:
    """Run work that waits for the object store, in threads of its own.

    reads_body  whether it waits for a client too; it then has a place for that
    """
    threads = _body_threads if reads_body else _read_threads
    return await query_in_thread(work, executor=threads)


class Disconnected(Exception):
    """The client disconnected before its body was complete."""


class Body:
    """A request's body as a file, for a thread that reads it while it arrives.

    Raises PayloadTooLarge beyond `max_bytes`, Disconnected, and InvalidRequest for a client that
    sends nothing for `SILENCE_S`.
    """

    def __init__(self, receive: Receive, *, max_bytes: int) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._left = max_bytes
        self._unread = b""
        self._is_over = False

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end. Do not call it on the event loop."""
        while not self._unread and not self._is_over:
            self._unread = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
        data, self._unread = self._unread[:size], self._unread[size:]
        return data

    async def drain(self) -> None:
        """Read on, up to a limit, for a client that reads the answer only after it sent all."""
        self._left = _DRAIN_BYTES
        with contextlib.suppress(ApiError, Disconnected, TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while not self._is_over:
                    await self._next()

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(SILENCE_S):
                message = await self._receive()
        except TimeoutError:
            raise InvalidRequest("The body did not arrive in time.") from None
        if message["type"] == "http.disconnect":
            raise Disconnected
        data: bytes = message.get("body", b"")
        self._is_over = not message.get("more_body", False)
        self._left -= len(data)
        if self._left < 0:
            self._is_over = True
            raise PayloadTooLarge("The body is longer than a file may be.")
        return data


class _ToWriter(FileUploadHandler):
    """Pass the one file of a form to a writer (Django's upload handler)."""

    def __init__(self, field: str, writer: FileWriter) -> None:
        super().__init__()
        self._field = field
        self._writer = writer
        #: The client's name of the file; None until the file has begun.
        self.filename: str | None = None

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        super().new_file(*args, **kwargs)
        if self.field_name != self._field or self.filename is not None:
            raise InvalidRequest(
                f"The form has one file, {self._field}.", param=str(self.field_name)[:100]
            )
        self.filename = self.file_name or "file"

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self._writer.write(raw_data)

    def file_complete(self, file_size: int) -> None:
        """Do nothing: the writer has the bytes."""


def read_form(
    request: HttpRequest, body: Body, writer: FileWriter, field: str
) -> tuple[QueryDict, str]:
    """Write the form's file; return the other fields, and the file's name. Raises ApiError.

    A request without a Content-Length is accepted too: the body has its own bound.
    """
    length = request.META.get("CONTENT_LENGTH") or str(MAX_FILE_BYTES)
    meta = {"CONTENT_TYPE": request.META.get("CONTENT_TYPE", ""), "CONTENT_LENGTH": length}
    handler = _ToWriter(field, writer)
    try:
        fields, _ = MultiPartParser(meta, cast(Any, body), [handler], "utf-8").parse()
    except (MultiPartParserError, SuspiciousOperation, RequestDataTooBig) as error:
        raise InvalidRequest(
            "The body is no form with a file: send it as multipart/form-data."
        ) from error
    if handler.filename is None:
        raise InvalidRequest(
            f"Missing required parameter: '{field}'.",
            param=field,
            code="missing_required_parameter",
        )
    return fields, handler.filename


Place = Callable[[uuid.UUID], contextlib.AbstractAsyncContextManager[None]]
