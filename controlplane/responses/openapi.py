"""The Responses API in the OpenAPI document."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

RESPONSE: Json = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "output", "status"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer", "description": "Seconds since 1970."},
        "model": {"type": "string"},
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
        "output": {"type": "array", "items": {"type": "object"}},
        "incomplete_details": {"type": ["object", "null"]},
        "usage": {"type": ["object", "null"]},
    },
}
