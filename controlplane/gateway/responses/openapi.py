"""The Responses API in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from controlplane.gateway.openapi import SCHEMA_ERROR, SERVICE_TIER

Json = dict[str, Any]

RESPONSE: Json = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "output", "status"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer", "description": "Seconds since 1970."},
        "completed_at": {
            "type": ["integer", "null"],
            "description": "Seconds since 1970; null unless it is completed.",
        },
        "model": {"type": "string"},
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
        "output": {"type": "array", "items": {"type": "object"}},
        "incomplete_details": {"type": ["object", "null"]},
        "service_tier": SERVICE_TIER,
        "usage": {"type": ["object", "null"]},
        "schema_error": SCHEMA_ERROR,
    },
}
