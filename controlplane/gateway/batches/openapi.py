"""What the OpenAPI document says of /v1/batches."""

from __future__ import annotations

from controlplane.batches.models import Batch
from controlplane.gateway.batches.bodies import BatchBody
from controlplane.gateway.batches.views import MAX_PAGE
from controlplane.gateway.openapi import (
    Json,
    body_schemas,
    operation,
    page_of,
    page_parameters,
    path_parameter,
    reference,
    with_body,
    with_parameters,
)

_MOMENT: Json = {"type": ["integer", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_FAULT: Json = {
    "type": "object",
    "required": ["code", "message", "param", "line"],
    "properties": {
        "code": {"type": "string"},
        "message": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "line": {"type": ["integer", "null"], "description": "Of the file, from 1 on."},
    },
}
_BATCH: Json = {
    "type": "object",
    "required": ["id", "object", "endpoint", "input_file_id", "completion_window", "status"],
    "properties": {
        "id": {"type": "string", "pattern": "^batch_[0-9a-f]{32}$"},
        "object": {"const": "batch"},
        "endpoint": {"type": "string"},
        "model": {"type": ["string", "null"]},
        "errors": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "object": {"const": "list"},
                        "data": {"type": "array", "items": _FAULT},
                    },
                },
                {"type": "null"},
            ]
        },
        "input_file_id": {"type": "string"},
        "completion_window": {"const": "24h"},
        "status": {"enum": Batch.Status.values},
        "output_file_id": {"type": ["string", "null"]},
        "error_file_id": {"type": ["string", "null"]},
        "created_at": {"type": "integer"},
        "expires_at": {"type": "integer"},
        **{
            f"{status}_at": _MOMENT
            for status in Batch.Status.values
            if status != Batch.Status.VALIDATING
        },
        "request_counts": {
            "type": "object",
            "properties": {"total": _COUNT, "completed": _COUNT, "failed": _COUNT},
        },
        "usage": {
            "type": "object",
            "properties": {
                "input_tokens": _COUNT,
                "output_tokens": _COUNT,
                "total_tokens": _COUNT,
                "input_tokens_details": {"type": "object"},
                "output_tokens_details": {"type": "object"},
            },
        },
        "metadata": {"type": ["object", "null"]},
    },
}

SCHEMAS: Json = {"Batch": _BATCH, "BatchList": page_of("Batch"), **body_schemas(BatchBody)}

_ID = path_parameter("batch_id")
PATHS: Json = {
    "/v1/batches": {
        "get": with_parameters(
            operation("The tenant's batches.", "batches", "BatchList"),
            *page_parameters(default=20, most=MAX_PAGE),
        ),
        "post": with_body(
            operation("Have a file of requests answered within a day.", "batch_create", "Batch"),
            reference("BatchBody"),
        ),
    },
    "/v1/batches/{batch_id}": {
        "get": with_parameters(operation("One batch.", "batch", "Batch"), _ID)
    },
    "/v1/batches/{batch_id}/cancel": {
        "post": with_parameters(
            operation("Stop a batch; what was answered stays.", "batch_cancel", "Batch"), _ID
        )
    },
}
