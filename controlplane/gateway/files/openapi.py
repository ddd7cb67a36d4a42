"""The OpenAPI document's entries for the addresses that take in and give out bytes."""

from __future__ import annotations

from controlplane.gateway.openapi import Json, operation, path_parameter, with_body, with_parameters

_BINARY: Json = {"type": "string", "format": "binary"}
_PART_FORM: Json = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": _BINARY},
    "additionalProperties": False,
}

SCHEMAS: Json = {
    "UploadPart": {
        "type": "object",
        "required": ["id", "object", "created_at", "upload_id"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "upload.part"},
            "created_at": {"type": "integer"},
            "upload_id": {"type": "string"},
        },
    }
}


def _content() -> Json:
    call = operation("The file's bytes, or those of one Range.", "file_content", answer=None)
    for status in ("200", "206"):
        content = {"application/octet-stream": {"schema": _BINARY}}
        call["responses"][status] = {"description": "", "content": content}
    return with_parameters(call, path_parameter("file_id"))


PATHS: Json = {
    "/v1/files/{file_id}/content": {"get": _content()},
    "/v1/uploads/{upload_id}/parts": {
        "post": with_body(
            with_parameters(
                operation("Send a part, of 64 MiB at most.", "upload_part", "UploadPart"),
                path_parameter("upload_id"),
            ),
            _PART_FORM,
            "multipart/form-data",
        )
    },
}
