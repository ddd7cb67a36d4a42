"""LoRAX's addresses in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from controlplane.gateway.lorax.schemas import ClassifyBody, GenerateBody
from controlplane.gateway.openapi import SCHEMA_ERROR

Json = dict[str, Any]

_TOKEN: Json = {
    "type": "object",
    "required": ["id", "text", "logprob", "special"],
    "properties": {
        "id": {"type": "integer"},
        "text": {"type": "string"},
        "logprob": {"type": "number"},
        "special": {"type": "boolean"},
        "alternative_tokens": {"type": "array", "items": {"type": "object"}},
    },
}
_DETAILS: Json = {
    "type": "object",
    "required": ["finish_reason", "prompt_tokens", "generated_tokens", "prefill", "tokens"],
    "properties": {
        "finish_reason": {"enum": ["length", "eos_token", "stop_sequence"]},
        "prompt_tokens": {"type": "integer"},
        "generated_tokens": {"type": "integer"},
        "seed": {"type": ["integer", "null"]},
        "prefill": {"type": "array"},
        "tokens": {"type": "array", "items": {"$ref": "#/components/schemas/LoraxToken"}},
        "best_of_sequences": {"type": "array", "items": {"type": "object"}},
    },
}
_ANSWER: Json = {
    "type": "object",
    "required": ["generated_text"],
    "properties": {
        "generated_text": {"type": "string"},
        "schema_error": SCHEMA_ERROR,
        "details": {"$ref": "#/components/schemas/LoraxDetails"},
    },
}
_LABELS: Json = {
    "type": "array",
    "description": "The likeliest first; of several texts, a list of such lists.",
    "items": {
        "type": ["object", "array"],
        "properties": {"label": {"type": "string"}, "score": {"type": "number"}},
    },
}
_ERROR: Json = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
}


def schemas() -> Json:
    """Return the components, by name."""
    parts: Json = {}
    for kind in (GenerateBody, ClassifyBody):
        body = kind.model_json_schema(ref_template="#/components/schemas/Lorax{model}")
        parts |= {f"Lorax{name}": part for name, part in body.pop("$defs", {}).items()}
        parts[f"Lorax{kind.__name__}"] = body
    return {
        **parts,
        "LoraxLabels": _LABELS,
        "LoraxToken": _TOKEN,
        "LoraxDetails": _DETAILS,
        "LoraxAnswer": _ANSWER,
        "LoraxInfo": {"type": "object", "required": ["model_id", "max_total_tokens"]},
        "LoraxError": _ERROR,
    }


def paths() -> Json:
    answer, events = _content("LoraxAnswer"), {"text/event-stream": {"schema": {"type": "string"}}}
    listed = {"schema": {"type": "array", "items": {"$ref": "#/components/schemas/LoraxAnswer"}}}
    either = {"application/json": listed, **events}
    return {
        "/": {"post": _post("root", "A list of one answer, or with `stream` events.", either)},
        "/generate": {"post": _post("generate", "Continue a text.", answer)},
        "/generate_stream": {
            "post": _post("generate_stream", "Continue a text, token by token.", events)
        },
        **{
            f"/{name}": {
                "post": _post(name, "Classify texts.", _content("LoraxLabels"), "ClassifyBody")
            }
            for name in ("classify", "classify_batch")
        },
        "/info": {"get": _operation("info", "The base model.", _content("LoraxInfo"))},
        "/health": {
            "get": {
                **_operation("health", "Whether a worker would take a request.", None),
                "security": [],
            }
        },
    }


def _post(name: str, description: str, content: Json, kind: str = "GenerateBody") -> Json:
    body = {"required": True, "content": _content(f"Lorax{kind}")}
    return {**_operation(name, description, content), "requestBody": body}


def _operation(name: str, description: str, content: Json | None) -> Json:
    error = {"description": "In LoRAX's form.", "content": _content("LoraxError")}
    done = {"description": ""} if content is None else {"description": "", "content": content}
    return {
        "operationId": f"lorax_{name}",
        "description": description,
        "tags": ["lorax"],
        "security": [{"apiKey": []}],
        "responses": {"200": done, "4XX": error, "500": error, "503": error},
    }


def _content(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
