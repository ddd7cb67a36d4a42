"""/v1/files and /v1/uploads: rows by Django REST framework, bytes by plain async views."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import ClassVar
from urllib.parse import quote

from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import ApiError, InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from controlplane.files import contents, services
from controlplane.files.contents import MAX_FILE_BYTES
from controlplane.files.models import File, Purpose, UploadPart
from controlplane.files.services import MAX_PART_BYTES, undone_on_failure
from controlplane.gateway.door import GatewayRequest, gateway_view
from controlplane.gateway.files.bodies import (
    FILE_FORM,
    CompleteBody,
    FileDeletedSerializer,
    FileSerializer,
    UploadBody,
    UploadSerializer,
    file_form,
    part_body,
)
from controlplane.gateway.files.receiving import FORM_BYTES, Body, Place, in_file_thread, read_form
from controlplane.gateway.rest.paging import Paging, page, page_of
from controlplane.gateway.row_views import GatewayAPIView
from controlplane.inference.parsing import parse_body
from controlplane.infra import storage
from controlplane.infra.web.threads import query_in_thread
from controlplane.tenants.permissions import Permission

_PAGING = Paging(default_limit=10_000, max_limit=10_000, id_prefix=File.PREFIX, has_order=True)
_RANGE = re.compile(r"bytes=(\d{0,20})-(\d{0,20})", re.ASCII)


@gateway_view({"POST": Permission.FILES_WRITE})
async def file_create(request: GatewayRequest, *, body: Body, place: Place) -> HttpResponseBase:
    """Receive a file. Called by `receiver.FileReceiver`."""
    max_bytes = _declared_bytes(request.http, MAX_FILE_BYTES)
    async with place(request.principal.tenant.id):
        file = await query_in_thread(
            request.as_caller(lambda: services.file_begin(max_bytes=max_bytes))
        )
        writer = services.file_writer(file, max_bytes=MAX_FILE_BYTES)

        def take_in() -> File:
            with undone_on_failure(writer.abort, lambda: services.file_drop(file)):
                fields, filename = read_form(request.http, body, writer, "file")
                form = file_form(fields, filename)
            return services.file_finish(file, form, writer)

        await in_file_thread(request.as_caller(take_in), reads_body=True)
    return JsonResponse(FileSerializer(file).data)


def _declared_bytes(request: HttpRequest, most: int) -> int:
    """Return an upper bound of the file's length: the body's Content-Length, else `most`.

    Raises InvalidRequest, PayloadTooLarge.
    """
    text = request.META.get("CONTENT_LENGTH") or ""
    if not text:
        return most
    if not text.isascii() or not text.isdigit():
        raise InvalidRequest("The Content-Length is no number.")
    if int(text[:15]) > most + FORM_BYTES:
        raise PayloadTooLarge(f"A body may have {most} bytes at most.")
    return min(most, int(text))


class FilesView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.FILES_READ, "POST": Permission.FILES_READ}

    @extend_schema(
        "gateway_files",
        [
            *_PAGING.parameters(),
            OpenApiParameter(
                "purpose",
                {"type": "string", "enum": Purpose.values},
                description="Only those for this.",
            ),
        ],
        responses=page_of(FileSerializer),
    )
    def get(self, request: Request) -> Response:
        """List the tenant's files."""
        rows = services.files_list()
        purpose = request.query_params.get("purpose")
        if purpose is not None:
            if purpose not in Purpose.values:
                raise InvalidRequest("There is no such purpose.", param="purpose")
            rows = rows.filter(purpose=purpose)
        return page(request, rows, FileSerializer, paging=_PAGING)

    @extend_schema(
        "gateway_file_create",
        request={"multipart/form-data": FILE_FORM},
        responses=FileSerializer,
    )
    def post(self, request: Request) -> Response:
        """Store a file."""
        # `receiver.FileReceiver` answers this address; this is its description.
        raise NotFound("Files are taken in by the web server alone.")


class FileView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.FILES_READ, "DELETE": Permission.FILES_WRITE}

    @extend_schema("gateway_file", responses=FileSerializer)
    def get(self, request: Request, file_id: str) -> Response:
        """One file."""
        return Response(FileSerializer(services.file_get(file_id)).data)

    @extend_schema("gateway_file_delete", responses={200: FileDeletedSerializer})
    def delete(self, request: Request, file_id: str) -> Response:
        """Remove a file."""
        services.file_delete(services.file_get(file_id))
        return Response(FileDeletedSerializer({"id": file_id}).data)


@gateway_view({"GET": Permission.FILES_READ})
async def file_content(request: GatewayRequest, file_id: str) -> HttpResponseBase:
    """Answer with the bytes, or with those that a Range header with one range asks for."""
    file = await query_in_thread(request.as_caller(lambda: services.file_get(file_id)))
    start, end = _range(request.http.headers.get("Range"), file.num_bytes)
    stream = _Content(contents.pieces(file, start=start, end=end))
    await stream.open()  # a failure can still change the status here
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
    """The file has none of the bytes that a Range header asks for."""

    status, type, code = 416, "invalid_request_error", "range_not_satisfiable"
    should_retry = False

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"The file has {num_bytes} bytes, and none of those asked for.")
        self._num_bytes = num_bytes

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Content-Range": f"bytes */{self._num_bytes}"}


def _range(header: str | None, num_bytes: int) -> tuple[int, int]:
    """Return the first byte to send and the one after the last.

    A header that cannot be read asks for everything. Raises RangeNotSatisfiable.
    """
    found = _RANGE.fullmatch(header or "")
    first, last = found.groups() if found else ("", "")
    if not first and not last:
        return 0, num_bytes
    if not first:  # the last bytes of the file
        start, end = max(0, num_bytes - int(last)), num_bytes
    elif last and int(last) < int(first):
        return 0, num_bytes
    else:
        start, end = int(first), min(num_bytes, int(last) + 1) if last else num_bytes
    if start >= end:
        raise RangeNotSatisfiable(num_bytes)
    return start, end


class _Content:
    """A file's bytes for the client; each piece is fetched when it is needed."""

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


class UploadsView(GatewayAPIView):
    permissions: ClassVar = {"POST": Permission.FILES_WRITE}

    @extend_schema("gateway_upload_create", request=UploadBody, responses=UploadSerializer)
    def post(self, request: Request) -> Response:
        """Announce a file that comes in parts."""
        body = self.body_of_write(UploadBody)
        upload = services.upload_create(
            form=body.form(), num_bytes=body.bytes, mime_type=body.mime_type
        )
        return Response(UploadSerializer(upload).data)


class UploadCompleteView(GatewayAPIView):
    permissions: ClassVar = {"POST": Permission.FILES_WRITE}
    run_in_thread = staticmethod(in_file_thread)

    @extend_schema("gateway_upload_complete", request=CompleteBody, responses=UploadSerializer)
    def post(self, request: Request, upload_id: str) -> Response:
        """Put the file together."""
        body = parse_body(CompleteBody, self.sent)
        upload = services.upload_complete(
            services.upload_get(upload_id), part_ids=body.part_ids, md5=body.md5
        )
        return Response(UploadSerializer(upload).data)


class UploadCancelView(GatewayAPIView):
    permissions: ClassVar = {"POST": Permission.FILES_WRITE}

    @extend_schema("gateway_upload_cancel", request=None, responses=UploadSerializer)
    def post(self, request: Request, upload_id: str) -> Response:
        """Give the upload up."""
        upload = services.upload_cancel(services.upload_get(upload_id))
        return Response(UploadSerializer(upload).data)


@gateway_view({"POST": Permission.FILES_WRITE})
async def part_create(
    request: GatewayRequest, *, body: Body, place: Place, upload_id: str
) -> HttpResponseBase:
    """Receive a part of an upload. Called by `receiver.FileReceiver`."""
    max_bytes = _declared_bytes(request.http, MAX_PART_BYTES)

    def begin() -> UploadPart:
        upload = services.upload_get(upload_id)
        return services.part_begin(upload, max_bytes=max_bytes)

    async with place(request.principal.tenant.id):
        part = await query_in_thread(request.as_caller(begin))
        writer = services.part_writer(part)

        def take_in() -> None:
            with undone_on_failure(writer.abort, lambda: services.part_drop(part)):
                fields, _ = read_form(request.http, body, writer, "data")
                if fields:
                    raise InvalidRequest("The form has one field, data.", param="data")
            services.part_finish(part, writer)

        await in_file_thread(request.as_caller(take_in), reads_body=True)
    return JsonResponse(part_body(part, upload_id))
