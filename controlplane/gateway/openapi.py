"""The pieces that the OpenAPI document's operations of /v1 are made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]

_KEY_ONLY: list[Json] = [{"apiKey": []}]

#: A field of finished answers, in whatever form they are.
SCHEMA_ERROR: Json = {
    "type": "string",
    "description": "Where and how the answer, or a call in it, breaks its schema; left out when it "
    "does not.",
}
SERVICE_TIER: Json = {"enum": ["default", "flex"], "description": "How it was served."}


def reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def operation(description: str, operation_id: str, answer: str | None) -> Json:
    """A call of /v1 that is answered with the JSON that the component `answer` describes."""
    content = {"application/json": {"schema": reference(answer)}} if answer else {}
    return {
        "operationId": f"gateway_{operation_id}",
        "description": description,
        "tags": ["gateway"],
        "security": _KEY_ONLY,
        "responses": {"200": {"description": "", "content": content}},
    }


def with_body(call: Json, schema: Json, media_type: str = "application/json") -> Json:
    """The call with a body that it needs."""
    content = {media_type: {"schema": schema}}
    return {**call, "requestBody": {"required": True, "content": content}}


def with_parameters(call: Json, *parameters: Json) -> Json:
    return {**call, "parameters": [*call.get("parameters", ()), *parameters]}


def path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def query_parameter(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def page_parameters(*, default: int, most: int) -> list[Json]:
    """Those of every list."""
    return [
        query_parameter("after", {"type": "string"}, "The `last_id` of the page before."),
        query_parameter(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": most, "default": default},
            "Items of a page.",
        ),
        query_parameter(
            "order",
            {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "By the time of their creation.",
        ),
    ]


def page_of(name: str) -> Json:
    """The form of a list of the component `name`."""
    return {
        "type": "object",
        "required": ["object", "data", "first_id", "last_id", "has_more"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": reference(name)},
            "first_id": {"type": ["string", "null"]},
            "last_id": {"type": ["string", "null"]},
            "has_more": {"type": "boolean"},
        },
    }


def body_schemas(body: type[BaseModel]) -> Json:
    """The schema of a pydantic model and of all that it refers to, by name."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), body.__name__: schema}
