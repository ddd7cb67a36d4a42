"""The pieces that the OpenAPI document's operations of plain async views are made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]

KEY_ONLY: list[Json] = [{"apiKey": []}]

#: A field of finished answers, in each of their forms.
SCHEMA_ERROR: Json = {
    "type": "string",
    "description": "Where and how the answer, or a call in it, breaks its schema; left out when it "
    "does not.",
}
SERVICE_TIER: Json = {"enum": ["default", "flex"], "description": "How it was served."}


def reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def operation(description: str, operation_id: str, answer: str | None) -> Json:
    """Describe a call of /v1 whose answer is the JSON of the component `answer`."""
    content = {"application/json": {"schema": reference(answer)}} if answer else {}
    return {
        "operationId": f"gateway_{operation_id}",
        "description": description,
        "tags": ["gateway"],
        "security": KEY_ONLY,
        "responses": {"200": {"description": "", "content": content}},
    }


def with_body(call: Json, schema: Json, media_type: str = "application/json") -> Json:
    """Return the call with a required body."""
    content = {media_type: {"schema": schema}}
    return {**call, "requestBody": {"required": True, "content": content}}


def with_parameters(call: Json, *parameters: Json) -> Json:
    return {**call, "parameters": [*call.get("parameters", ()), *parameters]}


def path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def body_schemas(body: type[BaseModel]) -> Json:
    """Return the schemas of a pydantic model and of all that it refers to, by name."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), body.__name__: schema}
