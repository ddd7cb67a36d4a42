"""What the OpenAPI document says of /v1/files and /v1/uploads."""

from __future__ import annotations

from controlplane.files.models import Purpose
from controlplane.gateway.files.bodies import (
    MAX_EXPIRES_S,
    MIN_EXPIRES_S,
    PURPOSES,
    CompleteBody,
    UploadBody,
)
from controlplane.gateway.files.views import MAX_PAGE
from controlplane.gateway.openapi import (
    Json,
    body_schemas,
    operation,
    page_of,
    page_parameters,
    path_parameter,
    query_parameter,
    reference,
    with_body,
    with_parameters,
)

_FILE: Json = {
    "type": "object",
    "required": ["id", "object", "bytes", "created_at", "filename", "purpose", "status"],
    "properties": {
        "id": {"type": "string", "pattern": "^file-[0-9a-f]{32}$"},
        "object": {"const": "file"},
        "bytes": {"type": "integer"},
        "created_at": {"type": "integer"},
        "expires_at": {"type": ["integer", "null"]},
        "filename": {"type": "string"},
        "purpose": {"enum": Purpose.values},
        "status": {"const": "processed"},
        "status_details": {"type": "null"},
    },
}
_UPLOAD: Json = {
    "type": "object",
    "required": ["id", "object", "bytes", "created_at", "expires_at", "status"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "upload"},
        "bytes": {"type": "integer"},
        "created_at": {"type": "integer"},
        "expires_at": {"type": "integer"},
        "filename": {"type": "string"},
        "purpose": {"enum": list(PURPOSES)},
        "status": {"enum": ["pending", "completed", "cancelled", "expired"]},
        "file": {"anyOf": [reference("File"), {"type": "null"}]},
    },
}
_PART: Json = {
    "type": "object",
    "required": ["id", "object", "created_at", "upload_id"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "upload.part"},
        "created_at": {"type": "integer"},
        "upload_id": {"type": "string"},
    },
}
_DELETED: Json = {
    "type": "object",
    "required": ["id", "object", "deleted"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "file"},
        "deleted": {"const": True},
    },
}
_FORM: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": list(PURPOSES)},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRES_S,
            "maximum": MAX_EXPIRES_S,
        },
    },
    "additionalProperties": False,
}
_PART_FORM: Json = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "format": "binary"}},
    "additionalProperties": False,
}

SCHEMAS: Json = {
    "File": _FILE,
    "FileList": page_of("File"),
    "FileDeleted": _DELETED,
    "Upload": _UPLOAD,
    "UploadPart": _PART,
    **body_schemas(UploadBody),
    **body_schemas(CompleteBody),
}


def _content() -> Json:
    call = operation("The file's bytes, or those of one Range.", "file_content", answer=None)
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    for status in ("200", "206"):
        call["responses"][status] = {"description": "", "content": binary}
    return with_parameters(call, path_parameter("file_id"))


def _upload_call(description: str, name: str, answer: str = "Upload") -> Json:
    return with_parameters(
        operation(description, f"upload_{name}", answer), path_parameter("upload_id")
    )


PATHS: Json = {
    "/v1/files": {
        "get": with_parameters(
            operation("The tenant's files.", "files", "FileList"),
            *page_parameters(default=MAX_PAGE, most=MAX_PAGE),
            query_parameter(
                "purpose", {"type": "string", "enum": Purpose.values}, "Only those for this."
            ),
        ),
        "post": with_body(
            operation("Store a file.", "file_create", "File"), _FORM, "multipart/form-data"
        ),
    },
    "/v1/files/{file_id}": {
        "get": with_parameters(operation("One file.", "file", "File"), path_parameter("file_id")),
        "delete": with_parameters(
            operation("Remove a file.", "file_delete", "FileDeleted"), path_parameter("file_id")
        ),
    },
    "/v1/files/{file_id}/content": {"get": _content()},
    "/v1/uploads": {
        "post": with_body(
            operation("Announce a file that comes in parts.", "upload_create", "Upload"),
            reference("UploadBody"),
        )
    },
    "/v1/uploads/{upload_id}/parts": {
        "post": with_body(
            _upload_call("Send a part, of 64 MiB at most.", "part", "UploadPart"),
            _PART_FORM,
            "multipart/form-data",
        )
    },
    "/v1/uploads/{upload_id}/complete": {
        "post": with_body(
            _upload_call("Put the file together.", "complete"), reference("CompleteBody")
        )
    },
    "/v1/uploads/{upload_id}/cancel": {"post": _upload_call("Give the upload up.", "cancel")},
}
