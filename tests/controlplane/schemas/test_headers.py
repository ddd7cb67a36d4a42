"""What a client is told, in headers, of a schema that is not enforced whole."""

from __future__ import annotations

import json

import pytest
from django.http import HttpResponse

from controlplane.inference.json_schema import schema_headers
from tests.messages import make_job


def headers_of(schema: object) -> dict[str, str]:
    return schema_headers(make_job(json_schema=json.dumps(schema)))


@pytest.mark.parametrize("name", ["plain", "a\r\nSet-Cookie: x=1", "a\x00", "\x7f", "é\u2028", " "])
def test_any_name_fits_into_a_header(name: str) -> None:
    told = headers_of({"properties": {name: {"uniqueItems": True, "frobnicate": 1}}})
    assert told.keys() == {"lorikeet-schema-checked", "lorikeet-schema-ignored"}
    response = HttpResponse(headers=told)  # raises for more than one line
    for header in told:
        assert response[header].isascii()
        assert response[header].isprintable()
