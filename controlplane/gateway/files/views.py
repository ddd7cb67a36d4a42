"""/v1/files and /v1/uploads. Plain async views, as the rest of the gateway."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote

from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse

from controlplane.errors import ApiError, InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from controlplane.files import contents, services
from controlplane.files.contents import MAX_FILE_BYTES
from controlplane.files.models import File, Purpose, UploadPart
from controlplane.files.services import MAX_PART_BYTES, undone_on_failure
from controlplane.gateway import callers
from controlplane.gateway.files.bodies import (
    CompleteBody,
    UploadBody,
    file_body,
    file_form,
    part_body,
    upload_body,
)
from controlplane.gateway.files.receiving import FORM_BYTES, Body, Place, in_file_thread, read_form
from controlplane.gateway.row_views import as_caller, idempotent, list_page
from controlplane.gateway.views import gateway_view
from controlplane.inference.parsing import parse_body
from controlplane.infra import storage
from controlplane.infra.threads import query_in_thread
from controlplane.tenants.permissions import Permission

MAX_PAGE = 10_000
_RANGE = re.compile(r"bytes=(\d{0,20})-(\d{0,20})", re.ASCII)


@gateway_view("POST")
async def file_create(request: HttpRequest, *, body: Body, place: Place) -> HttpResponseBase:
    """Take a file in. Called by `receiver.FileReceiver`."""
    principal = await callers.authenticate(request, Permission.FILES_WRITE)
    max_bytes = _declared_bytes(request, MAX_FILE_BYTES)
    async with place(principal.tenant.id):
        file = await query_in_thread(
            as_caller(request, principal, lambda: services.file_begin(max_bytes=max_bytes))
        )
        writer = services.file_writer(file, max_bytes=MAX_FILE_BYTES)

        def take_in() -> File:
            with undone_on_failure(writer.abort, lambda: services.file_drop(file)):
                fields, filename = read_form(request, body, writer, "file")
                form = file_form(fields, filename)
            return services.file_finish(file, form, writer)

        await in_file_thread(as_caller(request, principal, take_in), reads_body=True)
    return JsonResponse(file_body(file))


def _declared_bytes(request: HttpRequest, most: int) -> int:
    """No fewer than the file has: the whole body's length, if the client says it.

    Raises PayloadTooLarge.
    """
    text = request.META.get("CONTENT_LENGTH") or ""
    if not text:
        return most
    if not text.isascii() or not text.isdigit():
        raise InvalidRequest("The Content-Length is no number.")
    if int(text[:15]) > most + FORM_BYTES:
        raise PayloadTooLarge(f"A body may have {most} bytes at most.")
    return min(most, int(text))


@gateway_view("GET", "POST")
async def file_list(request: HttpRequest) -> HttpResponseBase:
    """The tenant's files; POST is `receiver.FileReceiver`'s and does not come here."""
    principal = await callers.authenticate(request, Permission.FILES_READ)
    if request.method == "POST":
        raise NotFound("Files are taken in by the web server alone.")
    purpose = request.GET.get("purpose")
    if purpose is not None and purpose not in Purpose.values:
        raise InvalidRequest("There is no such purpose.", param="purpose")

    def load() -> dict[str, object]:
        rows = services.files_list()
        if purpose is not None:
            rows = rows.filter(purpose=purpose)
        return list_page(
            request,
            rows,
            file_body,
            prefix=File.PREFIX,
            max_limit=MAX_PAGE,
            default_limit=MAX_PAGE,
        )

    return JsonResponse(await query_in_thread(as_caller(request, principal, load)))


@gateway_view("GET", "DELETE")
async def file_detail(request: HttpRequest, file_id: str) -> HttpResponseBase:
    if request.method == "GET":
        principal = await callers.authenticate(request, Permission.FILES_READ)
        file = await query_in_thread(
            as_caller(request, principal, lambda: services.file_get(file_id))
        )
        return JsonResponse(file_body(file))
    principal = await callers.authenticate(request, Permission.FILES_WRITE)
    await query_in_thread(
        as_caller(request, principal, lambda: services.file_delete(services.file_get(file_id)))
    )
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


@gateway_view("GET")
async def file_content(request: HttpRequest, file_id: str) -> HttpResponseBase:
    """The bytes, or those that a Range header with one range asks for."""
    principal = await callers.authenticate(request, Permission.FILES_READ)
    file = await query_in_thread(as_caller(request, principal, lambda: services.file_get(file_id)))
    start, end = _range(request.headers.get("Range"), file.num_bytes)
    stream = _Content(contents.pieces(file, start=start, end=end))
    await stream.open()  # while the status can still say that it fails
    response = StreamingHttpResponse(stream, content_type="application/octet-stream")
    response["Content-Length"] = str(end - start)
    response["Accept-Ranges"] = "bytes"
    response["ETag"] = f'"{file.sha256}"'
    response["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(file.filename)}"
    response["X-Content-Type-Options"] = "nosniff"
    if (start, end) != (0, file.num_bytes):
        response.status_code = 206
        response["Content-Range"] = f"bytes {start}-{end - 1}/{file.num_bytes}"
    return response


class RangeNotSatisfiable(ApiError):
    """None of the bytes that a Range header asks for are there."""

    status, type, code = 416, "invalid_request_error", "range_not_satisfiable"
    should_retry = False

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"The file has {num_bytes} bytes, and none of those asked for.")
        self._num_bytes = num_bytes

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Content-Range": f"bytes */{self._num_bytes}"}


def _range(header: str | None, num_bytes: int) -> tuple[int, int]:
    """The first byte to send and the one after the last; of an odd header, everything.

    Raises RangeNotSatisfiable.
    """
    found = _RANGE.fullmatch(header or "")
    first, last = found.groups() if found else ("", "")
    if not first and not last:
        return 0, num_bytes
    if not first:  # the last so many
        start, end = max(0, num_bytes - int(last)), num_bytes
    elif last and int(last) < int(first):
        return 0, num_bytes
    else:
        start, end = int(first), min(num_bytes, int(last) + 1) if last else num_bytes
    if start >= end:
        raise RangeNotSatisfiable(num_bytes)
    return start, end


class _Content:
    """A file's bytes on their way to the client, each piece fetched when it is wanted."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._first = b""

    async def open(self) -> None:
        """Fetch the first piece. Raises NotFound, Unavailable."""
        try:
            self._first = await self._next()
        except storage.ObjectMissing as error:
            raise NotFound("There is no such file.") from error
        except storage.STORAGE_ERRORS as error:
            raise Unavailable("The object store does not answer.") from error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        piece = self._first
        while piece:
            yield piece
            piece = await self._next()

    async def _next(self) -> bytes:
        return await in_file_thread(lambda: next(self._pieces, b""))


@gateway_view("POST")
async def upload_create(request: HttpRequest) -> HttpResponseBase:
    principal = await callers.authenticate(request, Permission.FILES_WRITE)
    content = request.read()
    body = parse_body(UploadBody, content)

    def create() -> dict[str, object]:
        upload = services.upload_create(
            form=body.form(), num_bytes=body.bytes, mime_type=body.mime_type
        )
        return upload_body(upload)

    return await query_in_thread(idempotent(request, principal, content, create))


@gateway_view("POST")
async def part_create(
    request: HttpRequest, *, body: Body, place: Place, upload_id: str
) -> HttpResponseBase:
    """Take a part in. Called by `receiver.FileReceiver`."""
    principal = await callers.authenticate(request, Permission.FILES_WRITE)
    max_bytes = _declared_bytes(request, MAX_PART_BYTES)

    def begin() -> UploadPart:
        upload = services.upload_get(upload_id)
        return services.part_begin(upload, max_bytes=max_bytes)

    async with place(principal.tenant.id):
        part = await query_in_thread(as_caller(request, principal, begin))
        writer = services.part_writer(part)

        def take_in() -> None:
            with undone_on_failure(writer.abort, lambda: services.part_drop(part)):
                fields, _ = read_form(request, body, writer, "data")
                if fields:
                    raise InvalidRequest("The form has one field, data.", param="data")
            services.part_finish(part, writer)

        await in_file_thread(as_caller(request, principal, take_in), reads_body=True)
    return JsonResponse(part_body(part, upload_id))


@gateway_view("POST")
async def upload_complete(request: HttpRequest, upload_id: str) -> HttpResponseBase:
    principal = await callers.authenticate(request, Permission.FILES_WRITE)
    body = parse_body(CompleteBody, request.read())
    upload = await in_file_thread(
        as_caller(
            request,
            principal,
            lambda: services.upload_complete(
                services.upload_get(upload_id), part_ids=body.part_ids, md5=body.md5
            ),
        )
    )
    return JsonResponse(upload_body(upload))


@gateway_view("POST")
async def upload_cancel(request: HttpRequest, upload_id: str) -> HttpResponseBase:
    principal = await callers.authenticate(request, Permission.FILES_WRITE)
    upload = await query_in_thread(
        as_caller(
            request, principal, lambda: services.upload_cancel(services.upload_get(upload_id))
        )
    )
    return JsonResponse(upload_body(upload))
