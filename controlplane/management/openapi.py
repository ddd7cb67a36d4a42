"""Complete the OpenAPI document: add the addresses of /v1 that plain async views serve, and the
parts that all operations share.

It is served at /api/openapi.json; `make openapi` writes it to a file.
"""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel

from controlplane.gateway.files import openapi as files
from controlplane.gateway.lorax import openapi as lorax
from controlplane.gateway.openapi import (
    SCHEMA_ERROR,
    SERVICE_TIER,
    Json,
    body_schemas,
    operation,
    reference,
    with_body,
)
from controlplane.gateway.responses.openapi import RESPONSE
from controlplane.gateway.tokenizing import DetokenizeBody, TokenizeBody
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.inference.vectors import EmbeddingsBody
from controlplane.tenants import idempotency

_MANAGEMENT = ("/api/v1/", "/ops/v1/")
#: Writes of /v1 that accept an Idempotency-Key.
_KEPT = ("/v1/batches", "/v1/uploads", "/v1/fine_tuning/jobs")
#: Other writes that accept one.
_KEPT_TOO = {("put", "/ops/v1/tenants/{slug}")}
_METHODS = ("get", "put", "post", "patch", "delete")

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The invalid field."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STAMP: Json = {
    "id": {"type": "string"},
    "object": {"type": "string"},
    "created": {"type": "integer", "description": "Seconds since 1970."},
    "model": {"type": "string"},
}
_USAGE: Json = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
}


def _answer(choice: Json, **more: Json) -> Json:
    """Return the schema of an answer with these choices and, from `more`, other fields."""
    choices = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "index": {"type": "integer"},
                "finish_reason": {"type": ["string", "null"]},
                "logprobs": {},
                **choice,
            },
        },
    }
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices"],
        "properties": {**_STAMP, **more, "choices": choices, "usage": _USAGE},
    }


_MESSAGE: Json = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "null"]}},
}
_COMPONENTS: Json = {
    "Error": _ERROR,
    "ChatCompletion": _answer(
        {"message": _MESSAGE, "schema_error": SCHEMA_ERROR}, service_tier=SERVICE_TIER
    ),
    "Completion": _answer({"text": {"type": "string"}}),
    "Embeddings": {
        "type": "object",
        "required": ["object", "data", "model", "usage"],
        "properties": {
            "object": {"enum": ["list"]},
            "data": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "object": {"enum": ["embedding"]},
                        "index": {"type": "integer"},
                        "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
                    },
                },
            },
            "model": {"type": "string"},
            "usage": {"type": "object", "properties": _USAGE["properties"]},
        },
    },
    "Response": RESPONSE,
    "Tokens": {
        "type": "object",
        "required": ["count", "max_model_len", "tokens", "token_strs"],
        "properties": {
            "count": {"type": "integer"},
            "max_model_len": {
                "type": "integer",
                "description": "The most tokens of prompt and answer together.",
            },
            "tokens": {"type": "array", "items": {"type": "integer"}},
            "token_strs": {"type": ["array", "null"], "items": {"type": "string"}},
        },
    },
    "Detokenized": {
        "type": "object",
        "required": ["prompt"],
        "properties": {"prompt": {"type": "string"}},
    },
}


_BODIES = (
    ChatBody, CompletionBody, EmbeddingsBody, ResponsesBody, TokenizeBody, DetokenizeBody,
)  # fmt: skip


def add_gateway(result: Json, generator: Any, request: Any, public: bool) -> Json:
    """Add the addresses of plain async views, with bodies from their pydantic models.

    drf-spectacular calls it as a hook.
    """
    schemas = result["components"]["schemas"]
    schemas.update(_COMPONENTS)
    schemas.update(lorax.schemas())
    result["paths"].update(lorax.paths())
    for body in _BODIES:
        schemas.update(body_schemas(body))
    schemas.update(files.SCHEMAS)
    result["paths"].update(copy.deepcopy(files.PATHS))  # `complete_operations` adds to them
    result["paths"].update(
        {
            "/v1/chat/completions": {
                "post": _generation(
                    "Answer a chat.", "chat_completions", ChatBody, "ChatCompletion"
                )
            },
            "/v1/completions": {
                "post": _generation("Continue a text.", "completions", CompletionBody, "Completion")
            },
            "/v1/embeddings": {
                "post": with_body(
                    operation("Return a vector of each input.", "embeddings", "Embeddings"),
                    reference("EmbeddingsBody"),
                )
            },
            "/v1/responses": {
                "post": _generation(
                    "Answer without storing anything.", "responses", ResponsesBody, "Response"
                )
            },
            "/v1/tokenize": {
                "post": with_body(
                    operation("Return the tokens of a text or a chat.", "tokenize", "Tokens"),
                    reference("TokenizeBody"),
                )
            },
            "/v1/detokenize": {
                "post": with_body(
                    operation("Return the text of tokens.", "detokenize", "Detokenized"),
                    reference("DetokenizeBody"),
                )
            },
        }
    )
    return result


def complete_operations(result: Json, generator: Any, request: Any, public: bool) -> Json:
    """Add errors to every operation, Idempotency-Key to every POST; drf-spectacular's hook."""
    error = {
        "description": "In OpenAI's form.",
        "content": {"application/json": {"schema": reference("Error")}},
    }
    for path, item in result["paths"].items():
        for method in _METHODS:
            if method not in item:
                continue
            call = item[method]
            call["responses"].setdefault("4XX", error)
            call["responses"].setdefault("503", error)
            is_kept = path.startswith(_MANAGEMENT) or path in _KEPT
            if (method == "post" and is_kept) or (method, path) in _KEPT_TOO:
                call.setdefault("parameters", []).append(_IDEMPOTENCY_KEY)
    result["paths"] = dict(sorted(result["paths"].items()))
    schemas = result["components"]["schemas"]
    result["components"]["schemas"] = dict(sorted(schemas.items()))
    return result


_IDEMPOTENCY_KEY: Json = {
    "in": "header",
    "name": idempotency.HEADER,
    "description": (
        "A unique string for one write. A repetition within 24 hours gets the first answer again."
    ),
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": idempotency.MAX_KEY_LENGTH,
        "pattern": "^[!-~]+$",
    },
}


def _generation(description: str, operation_id: str, body: type[BaseModel], answer: str) -> Json:
    call = operation(
        f"{description} With `stream` the answer is server-sent events.", operation_id, answer
    )
    content = call["responses"]["200"]["content"]
    content["text/event-stream"] = {"schema": {"type": "string"}}
    return with_body(call, reference(body.__name__))
