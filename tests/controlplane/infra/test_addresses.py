"""Who asks for an address that is none is told, in their form, which one they meant."""

from __future__ import annotations

import pytest
from django.test import Client

from controlplane.infra.web.addresses import suggested_address

MEANT = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/responses": "/v1/responses",
    "/models": "/v1/models",
    "/models/llama": "/v1/models/llama",
    "/v1/v1/chat/completions": "/v1/chat/completions",
    "/v1/v1/models": "/v1/models",
    "/v1/chat/completions/": "/v1/chat/completions",
    "/v1/models/": "/v1/models",
    "/v1//models": "/v1/models",
    "//v1/models": "/v1/models",
    "/openai/v1/chat/completions": "/v1/chat/completions",
    "/api/openai/v1/responses/": "/v1/responses",
    "/openai/deployments/x/chat/completions": "/v1/chat/completions",
    "/api/keys": "/api/v1/keys",
    "/v1/keys": "/api/v1/keys",
    "/keys": "/api/v1/keys",
    "/api/v1/keys/": "/api/v1/keys",
    "/generate/": "/generate",
    "/v1/generate_stream": "/generate_stream",
    "/v1/health": "/health",
}
NOTHING = ("/", "/v1", "/v1/", "/nowhere", "/console/keys/", "/x" * 5000, "/v1/moderations", "/%00")


@pytest.mark.parametrize("path", MEANT)
def test_the_address_that_was_meant_is_named(path: str, client: Client) -> None:
    assert suggested_address(path) == MEANT[path]
    answer = client.post(path.replace("//", "/%2F") if path.startswith("//") else path)
    assert (answer.status_code, answer["content-type"]) == (404, "application/json")
    error = answer.json()["error"]
    assert error["code"] == "unknown_url"
    if not path.startswith("//"):
        assert f"Did you mean {MEANT[path]}?" in error["message"]


@pytest.mark.parametrize("path", NOTHING, ids=lambda path: path[:20])
def test_nothing_is_made_up(path: str) -> None:
    assert suggested_address(path) is None


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/metrics", "/v1/organization/usage/completions"),
        ("/version", "/info"),
        ("/v1/version", "/info"),
        ("/ping", "/healthz"),
        ("/docs", "/api/docs"),
        ("/nowhere", "/v1/chat/completions"),
    ],
)
def test_what_other_servers_have_is_told(path: str, told: str, client: Client) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer["content-type"]) == (404, "application/json")
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/console/nowhere", "/admin/nowhere", "/nowhere"])
def test_a_browser_gets_a_page(path: str, client: Client) -> None:
    answer = client.get(path, headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert answer["content-type"] == "text/html; charset=utf-8"


def test_a_browser_gets_none_where_an_api_is(client: Client) -> None:
    answer = client.get("/v1/nowhere", headers={"accept": "text/html"})
    assert (answer.status_code, answer["content-type"]) == (404, "application/json")
