"""What the OpenAPI document says of /v1/organization/usage."""

from __future__ import annotations

from controlplane.gateway.openapi import Json, operation, query_parameter, with_parameters
from controlplane.gateway.usage.organization import GROUPS, MAX_TIME, WIDTHS

_COUNT: Json = {"type": "integer", "minimum": 0}
_RESULT: Json = {
    "type": "object",
    "required": ["object", "input_tokens", "output_tokens", "num_model_requests"],
    "properties": {
        "object": {"const": "organization.usage.completions.result"},
        "input_tokens": _COUNT,
        "output_tokens": _COUNT,
        "input_cached_tokens": {**_COUNT, "description": "Of the input tokens."},
        "input_audio_tokens": _COUNT,
        "output_audio_tokens": _COUNT,
        "num_model_requests": _COUNT,
        "project_id": {"type": "null"},
        "user_id": {"type": "null"},
        "api_key_id": {"type": ["string", "null"], "description": "With group_by alone."},
        "model": {"type": ["string", "null"], "description": "With group_by alone."},
        "batch": {"type": "null"},
    },
}
_BUCKET: Json = {
    "type": "object",
    "required": ["object", "start_time", "end_time", "results"],
    "properties": {
        "object": {"const": "bucket"},
        "start_time": {"type": "integer"},
        "end_time": {"type": "integer"},
        "results": {"type": "array", "items": _RESULT},
    },
}

SCHEMAS: Json = {
    "CompletionsUsage": {
        "type": "object",
        "required": ["object", "data", "has_more", "next_page"],
        "properties": {
            "object": {"const": "page"},
            "data": {"type": "array", "items": _BUCKET},
            "has_more": {"type": "boolean"},
            "next_page": {"type": ["string", "null"]},
        },
    }
}

_TIME: Json = {"type": "integer", "minimum": 0, "maximum": MAX_TIME}
_SIZES = ", ".join(f"{most} of {width}" for width, (_, _, _, most) in WIDTHS.items())
PATHS: Json = {
    "/v1/organization/usage/completions": {
        "get": with_parameters(
            operation("Tokens and requests in buckets of time.", "usage", "CompletionsUsage"),
            {**query_parameter("start_time", _TIME, "Unix seconds."), "required": True},
            query_parameter("end_time", _TIME, "Unix seconds; by default now."),
            query_parameter("bucket_width", {"enum": list(WIDTHS), "default": "1d"}, "In UTC."),
            query_parameter(
                "group_by",
                {"type": "array", "items": {"enum": list(GROUPS)}},
                "What results are told apart by.",
            ),
            query_parameter(
                "limit", {"type": "integer", "minimum": 1}, f"Buckets of a page: at most {_SIZES}."
            ),
            query_parameter("page", {"type": "string"}, "The `next_page` of the page before."),
        )
    }
}
