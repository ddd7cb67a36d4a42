"""lorax-client, unmodified, against a real gateway with a worker that echoes."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.messages.protocol import ErrorCode
from controlplane.errors import (
    ApiError,
    AuthenticationFailed,
    Conflict,
    GivenUp,
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    RateLimited,
    Unavailable,
)
from controlplane.gateway.lorax.errors import error_body, status_and_type
from controlplane.inference.schemas import MAX_MESSAGES
from tests.controlplane.gateway.lorax.conftest import LoraxClient, client_python
from tests.fakes import END, FAKE_CONTEXT, FAKE_NAME
from tests.live import LiveStack, wait_for

KINDS = ("sync", "async")
PROMPT = "the quick 🦜 fox"


@dataclasses.dataclass(frozen=True)
class Site:
    live: LiveStack
    url: str
    client: LoraxClient

    @property
    def key(self) -> str:
        return self.live.tenants["acme"].key

    def call(self, name: str, **arguments: Any) -> Any:
        key = arguments.pop("key", self.key)
        return self.client.call(name, self.url, key, **arguments)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=30)

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.get(self.url + path, headers=headers, timeout=30)

    def line(self, request_id: str) -> Any:
        path = f"/api/v1/requests/{request_id}"
        wait_for(
            lambda: self.get(path, self.key).status_code == 200, timeout_s=60, what="the log line"
        )
        return self.get(path, self.key).json()


@pytest.fixture(scope="module")
def site(live: LiveStack, lorax_client: LoraxClient) -> Iterator[Site]:
    pool = live.with_pool("lorax")
    web, url = pool.start_web(DATABASE_POOL_SIZE="4")
    worker = pool.start_worker("lorax-worker", step_s=0.001)
    accountant = pool.start_accountant()
    yield Site(pool, url, lorax_client)
    for process in (web, worker, accountant):
        process.stop(60)


def shown(tokens: list[Any]) -> str:
    return "".join(token["text"] for token in tokens if not token["special"])


class TestGenerate:
    @pytest.mark.parametrize("kind", KINDS)
    def test_text_and_details(self, site: Site, kind: str) -> None:
        answer = site.call("generate", kind=kind, prompt=PROMPT)
        assert answer.get("generated_text") == PROMPT, answer
        details = answer["details"]
        assert (details["finish_reason"], details["prefill"]) == ("eos_token", [])
        assert (details["seed"], details["best_of_sequences"]) == (None, None)
        assert details["generated_tokens"] == len(details["tokens"])
        assert details["prompt_tokens"] == details["generated_tokens"] - 1
        assert shown(details["tokens"]) == PROMPT
        *said, end = details["tokens"]
        assert {type(token["id"]) for token in said} == {int}
        assert {token["logprob"] for token in said} == {-0.5}
        assert (end["special"], end["text"]) == (True, "")

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_stream(self, site: Site, kind: str) -> None:
        events = site.call("generate_stream", kind=kind, prompt=PROMPT)
        assert shown([event["token"] for event in events]) == PROMPT
        *others, last = events
        assert {(event["generated_text"], event["details"]) for event in others} == {(None, None)}
        assert last["generated_text"] == PROMPT
        assert last["details"]["finish_reason"] == "eos_token"
        assert last["details"]["generated_tokens"] == len(events)
        assert last["details"]["prompt_tokens"] == len(events) - 1

    def test_a_stream_has_the_tokens_of_the_whole_answer(self, site: Site) -> None:
        whole = site.call("generate", prompt=PROMPT)["details"]["tokens"]
        streamed = [event["token"] for event in site.call("generate_stream", prompt=PROMPT)]
        assert streamed == whole

    def test_an_answer_that_breaks_what_is_only_checked_says_so(self, site: Site) -> None:
        """Beside the text, whether or not there are details; lorax-client reads on past it."""
        schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
        form = {"type": "json_object", "schema": schema}
        for details in (False, True):
            body = {
                "inputs": "[0, 0]",
                "parameters": {"response_format": form, "details": details},
            }
            told = "at /: [0, 0] has non-unique elements"
            whole = site.post("/generate", body)
            assert whole.headers["lorikeet-schema-checked"] == "/uniqueItems"
            assert (whole.json()["generated_text"], whole.json()["schema_error"]) == (
                *("[0, 0]", told),
            )
            assert site.post("/", body).json()[0]["schema_error"] == told
            lines = site.post("/generate_stream", body).text.splitlines()
            *others, last = (json.loads(line[5:]) for line in lines if line.startswith("data:"))
            assert (last["generated_text"], last["schema_error"]) == ("[0, 0]", told)
            assert not any("schema_error" in event for event in others)
        answer = site.call("generate", prompt="[0, 0]", response_format=form)
        assert answer.get("generated_text") == "[0, 0]", answer
        events = site.call("generate_stream", prompt="[0, 0]", response_format=form)
        assert events[-1]["generated_text"] == "[0, 0]"
        obeys = site.post("/generate", {**body, "inputs": "[0, 1]"}).json()
        assert "schema_error" not in obeys

    def test_each_of_several_answers_says_so_itself(self, site: Site) -> None:
        form = {"type": "json_object", "schema": {"type": "array", "uniqueItems": True}}
        parameters = {"response_format": form, "details": True, "best_of": 2, "do_sample": True}
        body = {"inputs": "[0, 0]", "parameters": parameters}
        answer = site.post("/generate", body).json()
        (other,) = answer["details"]["best_of_sequences"]
        assert "non-unique" in answer["schema_error"]
        assert answer["schema_error"] == other["schema_error"]
        assert "schema_error" not in answer["details"]

    def test_without_details(self, site: Site) -> None:
        assert site.call("generate", prompt="x", details=False)["details"] is None
        events = site.call("generate_stream", prompt="xy", details=False)
        assert [event["details"] for event in events] == [None] * len(events)
        assert events[-1]["generated_text"] == "xy"

    def test_a_bound_on_new_tokens(self, site: Site) -> None:
        answer = site.call("generate", prompt=PROMPT, max_new_tokens=3)
        assert answer["details"]["finish_reason"] == "length"
        assert answer["details"]["generated_tokens"] == len(answer["details"]["tokens"]) == 3
        events = site.call("generate_stream", prompt=PROMPT, max_new_tokens=3)
        assert events[-1]["details"]["finish_reason"] == "length"
        assert len(events) == 3

    def test_a_stop_sequence_is_part_of_the_text(self, site: Site) -> None:
        arguments = {"prompt": "one two three", "stop_sequences": ["two"]}
        answer = site.call("generate", **arguments)
        assert answer["generated_text"] == "one two"
        assert answer["details"]["finish_reason"] == "stop_sequence"
        events = site.call("generate_stream", **arguments)
        assert events[-1]["generated_text"] == "one two"
        assert events[-1]["details"]["finish_reason"] == "stop_sequence"

    def test_the_prompt_before_the_text(self, site: Site) -> None:
        arguments = {"prompt": "ab", "return_full_text": True}
        assert site.call("generate", **arguments)["generated_text"] == "abab"
        assert site.call("generate_stream", **arguments)[-1]["generated_text"] == "abab"

    def test_a_truncated_prompt_keeps_its_end(self, site: Site) -> None:
        answer = site.call("generate", prompt="x" * 5000 + "abc", truncate=3)
        assert answer["generated_text"] == "abc"
        assert answer["details"]["prompt_tokens"] == 3

    def test_a_seed_is_told_when_tokens_are_drawn(self, site: Site) -> None:
        drawn = site.call("generate", prompt="x", do_sample=True)["details"]["seed"]
        assert isinstance(drawn, int)
        given = {"prompt": "x", "temperature": 0.7, "top_k": 5, "top_p": 0.5, "seed": 2**64 - 1}
        assert site.call("generate", **given)["details"]["seed"] == 2**64 - 1
        assert site.call("generate", prompt="x", seed=3)["details"]["seed"] is None

    def test_the_best_of_several(self, site: Site) -> None:
        details = site.call("generate", prompt="abc", best_of=2, do_sample=True)["details"]
        assert len(details["best_of_sequences"]) == 1
        other = details["best_of_sequences"][0]
        assert (other["generated_text"], other["finish_reason"]) == ("abc", "eos_token")
        assert details["generated_tokens"] == other["generated_tokens"] == 4

    def test_alternatives_to_each_token(self, site: Site) -> None:
        answer = site.call("generate", prompt="ab", return_k_alternatives=2)
        for token in answer["details"]["tokens"][:-1]:
            first, second = token["alternative_tokens"]
            assert (first["id"], first["logprob"]) == (token["id"], token["logprob"])
            assert (second["id"], second["logprob"]) == (token["id"] + 1, -1.5)

    def test_more_than_the_eos_token(self, site: Site) -> None:
        answer = site.call("generate", prompt="ab", ignore_eos_token=True, max_new_tokens=5)
        assert answer["generated_text"] == "ababa"


class TestAdapters:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["acme-adapter", "acme-adapter@1", "acme-adapter/1"])
    def test_one(self, site: Site, kind: str, name: str) -> None:
        answer = site.call("generate", kind=kind, prompt="x", adapter_id=name)
        assert answer["generated_text"] == "x"
        answer = site.post("/generate", {"inputs": "x", "parameters": {"adapter_id": name}})
        assert answer.headers["x-adapter-id"] == name.replace("/", "@")
        line = site.line(answer.headers["x-request-id"])
        assert (line["endpoint"], len(line["digests"])) == ("/generate", 1)

    def test_none(self, site: Site) -> None:
        for adapter_id in (None, "", "__base__", FAKE_NAME):
            parameters = {} if adapter_id is None else {"adapter_id": adapter_id}
            answer = site.post("/generate", {"inputs": "x", "parameters": parameters})
            assert answer.headers["x-model-id"] == FAKE_NAME
            assert "x-adapter-id" not in answer.headers
            assert site.line(answer.headers["x-request-id"])["digests"] == []

    def test_what_it_took_is_in_the_headers(self, site: Site) -> None:
        body = {"inputs": "one two", "parameters": {"adapter_id": "acme-adapter"}}
        headers = site.post("/generate", body).headers
        took = {
            name: int(headers[f"x-{name}-time"])
            for name in ("compute", "total", "validation", "queue", "inference")
        }
        assert took["compute"] == took["total"] >= took["inference"]
        parts = took["validation"] + took["queue"] + took["inference"]
        assert took["total"] - 3 <= parts <= took["total"] + 3
        per_token = int(headers["x-time-per-token"])
        assert per_token == pytest.approx(
            took["inference"] / int(headers["x-generated-tokens"]), abs=1
        )
        assert headers["x-compute-type"] == "cpu+optimized"
        assert headers["x-compute-characters"] == "7"
        assert headers["x-adapter-source"] == "local"
        streamed = site.post("/generate_stream", body).headers
        assert (streamed["x-compute-type"], streamed["x-compute-characters"]) == (
            "cpu+optimized",
            "7",
        )
        assert "x-total-time" not in streamed

    def test_where_it_came_from_makes_no_difference(self, site: Site) -> None:
        arguments = {"adapter_id": "acme-adapter", "adapter_source": "hub", "api_token": "hf_x"}
        assert site.call("generate", prompt="x", **arguments)["generated_text"] == "x"

    def test_a_blend(self, site: Site) -> None:
        merged = {"ids": ["acme-adapter", "acme-second/1"], "weights": [0.3, 0.7], "density": 0.0}
        for kind in KINDS:
            for call in ("generate", "generate_stream"):
                answer = site.call(
                    call,
                    kind=kind,
                    prompt="x",
                    merged_adapters={**merged, "merge_strategy": "linear"},
                )
                last = answer[-1] if call == "generate_stream" else answer
                assert last["generated_text"] == "x", answer
        answer = site.post("/generate", {"inputs": "x", "parameters": {"merged_adapters": merged}})
        assert answer.headers["x-adapter-id"] == "acme-adapter,acme-second@1"
        assert len(site.line(answer.headers["x-request-id"])["digests"]) == 2

    @pytest.mark.parametrize("strategy", ["ties", "dare_linear", "dare_ties"])
    def test_a_merge_that_is_no_sum_is_refused_by_name(self, site: Site, strategy: str) -> None:
        merged = {"ids": ["acme-adapter"], "weights": [1.0], "density": 0.5}
        merged["merge_strategy"] = strategy  # type: ignore[assignment]
        answer = site.call("generate", prompt="x", merged_adapters=merged)
        assert answer["error"] == "ValidationError"
        assert "parameters.merged_adapters.merge_strategy" in answer["message"]


class TestErrors:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("call", ["generate", "generate_stream"])
    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"adapter_id": "nobodys"}, "NotFoundError", "nobodys"),
            ({"adapter_id": "globex-adapter"}, "NotFoundError", "globex-adapter"),
            ({"adapter_id": "acme-misfit"}, "GenerationError", "does not fit"),
            ({"prompt": "x" * 9 * FAKE_CONTEXT}, "ValidationError", "inputs"),
            ({"typical_p": 0.5}, "ValidationError", "parameters.typical_p"),
            ({"watermark": True}, "ValidationError", "parameters.watermark"),
            ({"temperature": 5.0}, "ValidationError", "parameters.temperature"),
            ({"key": "lk_live_wrong"}, "UnknownError", "401"),
        ],
        ids=str,
    )
    def test_each_is_its_exception(
        self, site: Site, kind: str, call: str, arguments: dict[str, Any], error: str, words: str
    ) -> None:
        answer = site.call(call, kind=kind, **{"prompt": "x", **arguments})
        assert answer["error"] == error, answer
        assert words in answer["message"]

    @pytest.mark.parametrize(
        ("error", "status", "raised"),
        [
            (InvalidRequest("m", param="prompt"), 422, "ValidationError"),
            (AuthenticationFailed("m"), 401, "UnknownError"),
            (PermissionDenied("m"), 403, "ShardNotReadyError"),
            (NotFound("m"), 404, "NotFoundError"),
            (Conflict("m"), 424, "GenerationError"),
            (GivenUp("m"), 424, "GenerationError"),
            (RateLimited("m"), 429, "RateLimitExceededError"),
            (RateLimited("m", code="slow_down"), 429, "OverloadedError"),
            (Unavailable("m", code="server_is_overloaded"), 429, "OverloadedError"),
            (Unavailable("m", code="something"), 503, "OverloadedError"),
            (Unavailable("m", code=ErrorCode.WORKER_LOST), 500, "IncompleteGenerationError"),
            (InternalError("m"), 500, "IncompleteGenerationError"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, ApiError) else None,
    )
    def test_the_client_knows_every_failure(
        self, lorax_client: LoraxClient, error: ApiError, status: int, raised: str
    ) -> None:
        assert status_and_type(error)[0] == status
        request = {"call": "parse_error", "status": status, "body": error_body(error)}
        assert lorax_client.ask(request)["error"] == raised
        if raised.startswith(("Incomplete", "Overloaded", "Generation")):
            # In a stream, whose status is long sent, the body alone must tell.
            assert lorax_client.ask({**request, "status": 200})["error"] == raised

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"{", "not valid JSON"),
            ({}, "inputs"),
            ({"inputs": ""}, "inputs"),
            ({"inputs": "x", "parameters": {"top_n_tokens": 3}}, "parameters.top_n_tokens"),
            ({"inputs": "x", "parameters": {"decoder_input_details": True}}, "decoder_input"),
            ({"inputs": "x", "parameters": {"best_of": 2}}, "best_of"),
            ({"inputs": "x", "parameters": {"apply_chat_template": True}}, "inputs"),
            (
                {"inputs": "x", "parameters": {"adapter_id": "a", "merged_adapters": {}}},
                "merged_adapters",
            ),
            (
                {"inputs": "x", "parameters": {"merged_adapters": {"ids": ["a"], "weights": []}}},
                "weights",
            ),
        ],
        ids=str,
    )
    def test_what_is_wrong_is_named(self, site: Site, body: Any, words: str) -> None:
        answer = site.post("/generate", body)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        assert words in answer.json()["error"]
        assert set(answer.json()) == {"error", "error_type"}

    @pytest.mark.parametrize(
        "inputs",
        [
            r'[{"role": "user", "content": "\ud800"}]',
            '[{"role": "user", "content": "x", "annotations": [1e999]}]',
            '[{"role": "user", "content": 5}]',
            "[[]]",
            "[" * 5000,
            "[]",
            json.dumps([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)),
        ],
        ids=["half a character", "infinite", "number", "list", "deep", "none", "many"],
    )
    def test_messages_are_read_as_a_body_is(self, site: Site, inputs: str) -> None:
        body = {"inputs": inputs, "parameters": {"apply_chat_template": True}}
        answer = site.post("/generate", body)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        assert "inputs must be a JSON list of messages" in answer.json()["error"]

    def test_several_answers_cannot_be_streamed(self, site: Site) -> None:
        body = {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}
        assert site.post("/generate_stream", body).status_code == 422

    def test_a_wrong_key_comes_before_a_wrong_body(self, site: Site) -> None:
        assert site.post("/generate", b"{", Authorization="Bearer x").status_code == 401


class TestAddresses:
    def test_generate_is_one_answer_and_the_root_a_list(self, site: Site) -> None:
        body = {"inputs": "ab", "parameters": {"details": None, "no_such_field": None}}
        assert site.post("/generate", body).json() == {"generated_text": "ab"}
        assert site.post("/", body).json() == [{"generated_text": "ab"}]
        for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
            answer = site.post(path, {**body, **more})
            assert answer.headers["content-type"] == "text/event-stream"
            lines = [line for line in answer.text.split("\n\n") if line.startswith("data:")]
            assert json.loads(lines[-1].removeprefix("data:"))["generated_text"] == "ab"

    def test_headers_count_the_tokens(self, site: Site) -> None:
        headers = site.post("/generate", {"inputs": "abc"}).headers
        assert headers["x-prompt-tokens"] == "3"
        assert headers["x-generated-tokens"] == "4"
        assert headers["x-total-tokens"] == "7"
        assert headers["x-compute-characters"] == "3"

    def test_a_chat_template(self, site: Site) -> None:
        chat = json.dumps([{"role": "user", "content": "hello"}])
        parameters = {"apply_chat_template": True, "details": True}
        answer = site.post("/generate", {"inputs": chat, "parameters": parameters}).json()
        assert answer["generated_text"] == "hello"
        assert answer["details"]["prompt_tokens"] > answer["details"]["generated_tokens"]

    def test_control_tokens_of_a_raw_prompt_are_its_authors(self, site: Site) -> None:
        parameters = {"details": True}
        answer = site.post("/generate", {"inputs": "a<|end|>b", "parameters": parameters}).json()
        assert answer["generated_text"] == "b"
        assert answer["details"]["prompt_tokens"] == 3
        assert END == 2

    def test_health_needs_no_key_and_info_does(self, site: Site) -> None:
        assert site.get("/health").status_code == 200
        assert site.get("/info").status_code == 401
        info = site.get("/info", site.key).json()
        assert (info["model_id"], info["max_total_tokens"]) == (FAKE_NAME, FAKE_CONTEXT)
        assert info["max_best_of"] >= 2

    def test_the_root_is_still_the_consoles(self, site: Site) -> None:
        answer = site.get("/")
        assert (answer.status_code, answer.headers["location"]) == (302, "/console/")

    def test_what_is_missing_says_so(self, site: Site) -> None:
        answer = site.post("/embed", {"inputs": "x"})
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")

    def test_another_method(self, site: Site) -> None:
        answer = site.get("/generate", site.key)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_the_pages_example_runs(site: Site) -> None:
    page = (Path(__file__).parents[4] / "docs" / "from-lorax.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    code = code.replace("invoices", "acme-adapter")
    env = {"LORIKEET_URL": site.url, "OPENAI_API_KEY": site.key}
    done = subprocess.run(
        [client_python(), "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Total of 3 x 12? FinishReason.Length\nTotal of 3 x 12?"


def test_no_worker_is_no_health(live: LiveStack) -> None:
    pool = live.with_pool("lorax-empty")
    web, url = pool.start_web()
    answer = httpx.get(f"{url}/health", timeout=30)
    assert (answer.status_code, answer.json()["error_type"]) == (503, "healthcheck")
    web.stop(60)
