"""POST /api/v1/schemas/lint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.controlplane.conftest import Party, as_key, as_user, assert_error

LINT = "/api/v1/schemas/lint"


def test_the_report_names_every_keyword(acme: Party) -> None:
    schema = {
        "type": "object",
        "title": "Order",
        "properties": {"tags": {"type": "array", "items": {"minimun": 3}, "uniqueItems": True}},
    }
    for client in (as_key(acme), as_user(acme.viewer)):
        answer = client.post(LINT, {"schema": schema}, format="json")
        assert answer.status_code == 200
        report = answer.json()
        assert (report["object"], report["strict_ok"]) == ("schema_report", False)
        statuses = {finding["path"]: finding["status"] for finding in report["findings"]}
        assert statuses == {
            "/type": "enforced",
            "/title": "annotation",
            "/properties": "enforced",
            "/properties/tags/type": "enforced",
            "/properties/tags/items": "enforced",
            "/properties/tags/items/minimun": "unsupported",
            "/properties/tags/uniqueItems": "checked",
        }
        reasons = {finding["keyword"]: finding["reason"] for finding in report["findings"]}
        assert "compare" in reasons["uniqueItems"]
        assert "no such keyword" in reasons["minimun"]


def test_what_strict_takes(acme: Party) -> None:
    schema = {"type": "integer", "minimum": 3, "multipleOf": 7}
    report = as_key(acme).post(LINT, {"schema": schema}, format="json").json()
    assert report["strict_ok"] is True


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "schema"),
        ({"schema": []}, "schema"),
        ({"schema": {"type": "text"}}, "schema"),
        ({"schema": {"$ref": "https://example.com/s"}}, "schema"),
        ({"schema": {"properties": {"a": {"pattern": "["}}}}, "schema"),
        ({"schema": {}, "strict": True}, "strict"),
    ],
    ids=str,
)
def test_what_is_no_schema_is_refused(acme: Party, body: dict[str, Any], param: str) -> None:
    answer = as_key(acme).post(LINT, body, format="json")
    assert_error(answer, 400, param)


def test_a_stranger_is_refused(client: Any, db: None) -> None:
    assert client.post(LINT, {"schema": {}}, content_type="application/json").status_code == 401
