"""What a client is told, in headers, of a schema that is not enforced whole."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from django.http import HttpResponse

from controlplane.inference.json_schema import schema_headers
from tests.messages import make_job


def headers_of(schema: object = None, **fields: Any) -> dict[str, str]:
    json_schema = None if schema is None else json.dumps(schema)
    return schema_headers(make_job(tenant_id=str(uuid.uuid4()), json_schema=json_schema, **fields))


@pytest.mark.parametrize("name", ["plain", "a\r\nSet-Cookie: x=1", "a\x00", "\x7f", "é\u2028", " "])
def test_any_name_fits_into_a_header(name: str) -> None:
    told = headers_of({"properties": {name: {"uniqueItems": True, "frobnicate": 1}}})
    assert told.keys() == {"lorikeet-schema-checked", "lorikeet-schema-ignored"}
    response = HttpResponse(headers=told)  # raises for more than one line
    for header in told:
        assert response[header].isascii()
        assert response[header].isprintable()


def test_a_tools_paths_are_told_after_its_name() -> None:
    def tool(name: str, *keywords: str) -> dict[str, Any]:
        items = dict.fromkeys(keywords, True)
        parameters = {"type": "object", "properties": {"a": {"type": "array", **items}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = (tool("f", "uniqueItems"), tool("g"), tool("h", "uniqueItems", "frobnicate"))
    assert headers_of({"uniqueItems": True}, tools=tools) == {
        "lorikeet-schema-checked": (
            "/uniqueItems, f:/properties/a/uniqueItems, h:/properties/a/uniqueItems"
        ),
        "lorikeet-schema-ignored": "h:/properties/a/frobnicate",
    }
    assert headers_of(tools=(tool("g"),)) == {}
    assert headers_of(tools=tools, strict_tools=("f", "h")) == {}
