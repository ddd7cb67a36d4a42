"""Every failure leaves in OpenAI's body, and every worker code has an answer."""

from __future__ import annotations

import json

import pytest
from django.core.exceptions import ValidationError
from django.test import Client, RequestFactory
from rest_framework import exceptions as drf

from contract.messages.protocol import ErrorCode
from controlplane import errors
from controlplane.infra.web import addresses


def test_every_worker_code_is_answered() -> None:
    assert set(errors.WORKER_ERRORS) == set(ErrorCode)


def test_worker_error_keeps_code_and_field() -> None:
    error = errors.from_worker("context_length_exceeded", "too long", "messages")
    assert error.status == 400
    assert error.body()["error"] == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_unknown_worker_code_is_a_500() -> None:
    assert errors.from_worker("brand_new", "?").status == 500


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (errors.InvalidRequest("x"), {"x-should-retry": "false"}),
        (errors.Conflict("x"), {"x-should-retry": "false"}),
        (errors.RateLimited("x", retry_after_s=2.6), {"Retry-After": "3"}),
        (errors.Unavailable("x"), {"Retry-After": "1"}),
        (errors.AuthenticationFailed("x"), {"WWW-Authenticate": "Bearer"}),
        (errors.NotFound("x"), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_headers_for_clients(error: errors.ApiError, headers: dict[str, str]) -> None:
    assert error.headers() == headers
    response = error.response()
    assert response.status_code == error.status
    assert set(json.loads(response.content)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("detail", "param"),
    [
        ({"name": ["Too long."]}, "name"),
        ({"files": {"a.json": ["Not a number."]}}, "files.a.json"),
        ({"rows": [{}, {"x": ["Bad."]}]}, "rows.1.x"),
        ({"non_field_errors": ["Odd."]}, None),
        (["Odd."], None),
    ],
    ids=str,
)
def test_first_wrong_field_is_named(detail: object, param: str | None) -> None:
    response = errors.drf_exception_handler(drf.ValidationError(detail), {})  # type: ignore[arg-type]
    assert response is not None
    assert (response.status_code, response.data["error"]["param"]) == (400, param)


def test_model_validation_names_the_field() -> None:
    error = errors.from_validation(ValidationError({"slug": ["Bad slug."]}))
    assert (error.param, error.message) == ("slug", "Bad slug.")
    assert errors.from_validation(ValidationError("Bad.")).param is None


@pytest.mark.parametrize(
    ("path", "accept", "kind"),
    [
        ("/api/nowhere", "text/html", "application/json"),
        ("/v1/nowhere", "text/html", "application/json"),
        ("/x", "text/html", "text/html"),
        ("/x", "*/*", "application/json"),
    ],
)
def test_unknown_addresses(client: Client, path: str, accept: str, kind: str) -> None:
    answer = client.get(path, headers={"accept": accept})
    assert (answer.status_code, answer["Content-Type"].split(";")[0]) == (404, kind)


def test_unexpected_failure_says_nothing_of_its_cause() -> None:
    answer = addresses.server_error(RequestFactory().get("/api/v1/adapters"))
    assert json.loads(answer.content)["error"]["code"] == "internal"
    assert addresses.server_error(RequestFactory().get("/console")).status_code == 500
