"""The official client's `responses`, against a real gateway with a worker that echoes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

from contract.messages.protocol import CALL_BEGIN, CALL_END, TokenEvent, Usage
from controlplane.errors import Unavailable
from controlplane.inference.responses.answers import ResponsesAnswer
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.responses.translation import chat_body
from tests.fakes import FAKE_CONTEXT, FAKE_NAME
from tests.live import LiveStack, wait_for

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'


class Person(pydantic.BaseModel):
    name: str
    age: int


@dataclasses.dataclass(frozen=True)
class Site:
    live: LiveStack
    url: str

    @property
    def key(self) -> str:
        return self.live.tenants["acme"].key

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def post(self, body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.post(f"{self.url}/v1/responses", json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def site(live: LiveStack) -> Iterator[Site]:
    pool = live.with_pool("responses")
    web, url = pool.start_web(DATABASE_POOL_SIZE="4")
    worker = pool.start_worker("responses-worker", step_s=0.001)
    accountant = pool.start_accountant()
    yield Site(pool, url)
    for process in (web, worker, accountant):
        process.stop(60)


def events_of(answer: httpx.Response) -> list[Any]:
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if "data: " in block]
    found = []
    for name, data in blocks:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


class TestCreate:
    def test_text(self, site: Site) -> None:
        response = site.client.responses.create(
            model="acme-adapter", input="Grüße 🦜", instructions="Be kind.", metadata={"a": "b"}
        )
        assert response.output_text == "Grüße 🦜"
        assert (response.status, response.error, response.incomplete_details) == (
            *("completed", None, None),
        )
        assert (response.model, response.instructions) == ("acme-adapter", "Be kind.")
        assert response.metadata == {"a": "b"}
        [message] = response.output
        assert (message.type, message.status) == ("message", "completed")
        usage = response.usage
        assert usage is not None
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        request_id = response.id.replace("resp_", "req_")
        assert response._request_id == request_id
        path = f"{site.url}/api/v1/requests/{request_id}"
        headers = {"Authorization": f"Bearer {site.key}"}
        wait_for(
            lambda: httpx.get(path, headers=headers).status_code == 200,
            timeout_s=60,
            what="the log line",
        )
        line = httpx.get(path, headers=headers).json()
        assert line["endpoint"] == "/v1/responses"
        assert line["completion_tokens"] == usage.output_tokens

    async def test_async(self, site: Site) -> None:
        client = AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0)
        response = await client.responses.create(model=FAKE_NAME, input="hi")
        assert response.output_text == "hi"

    def test_a_conversation_that_the_client_keeps(self, site: Site) -> None:
        first = site.client.responses.create(model=FAKE_NAME, input="one")
        items: list[Any] = [{"role": "user", "content": "one"}]
        items += [item.model_dump() for item in first.output]
        items += [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
        second = site.client.responses.create(model=FAKE_NAME, input=items)
        assert second.output_text == "two"
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens

    def test_an_answer_that_was_cut_is_incomplete(self, site: Site) -> None:
        response = site.client.responses.create(
            model=FAKE_NAME, input="abcdef", max_output_tokens=3
        )
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == "abc"
        assert response.output[0].status == "incomplete"  # type: ignore[union-attr]

    def test_a_blend_and_the_fields_beyond(self, site: Site) -> None:
        adapters = [{"name": "acme-adapter", "weight": 0.5}, {"name": "acme-second"}]
        more = {"adapters": adapters, "seed": 3, "stop": ["c"], "top_k": 5}
        response = site.client.responses.create(
            model=FAKE_NAME, input="abcd", store=False, extra_body=more
        )
        assert (response.output_text, response.status) == ("ab", "completed")

    def test_logprobs_where_they_are_asked_for(self, site: Site) -> None:
        response = site.client.responses.create(
            model=FAKE_NAME,
            input="ab",
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
        [part] = response.output[0].content  # type: ignore[union-attr]
        assert [entry.token for entry in part.logprobs] == ["a", "b"]  # type: ignore[union-attr]
        assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr,index]

    def test_an_answer_that_breaks_what_is_only_checked_says_so(self, site: Site) -> None:
        schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
        text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        raw = site.client.responses.with_raw_response.create(
            model=FAKE_NAME, input="[0, 0]", text=text
        )
        assert raw.headers["lorikeet-schema-checked"] == "/uniqueItems"
        told = "at /: [0, 0] has non-unique elements"
        assert (raw.parse().model_extra or {})["schema_error"] == told
        stream = site.client.responses.create(
            model=FAKE_NAME, input="[0, 0]", text=text, stream=True
        )
        *_, last = stream
        assert last.type == "response.completed"
        assert (last.response.model_extra or {})["schema_error"] == told
        obeys = site.client.responses.create(model=FAKE_NAME, input="[0, 1]", text=text)
        assert "schema_error" not in (obeys.model_extra or {})

    def test_when_it_was_completed(self, site: Site) -> None:
        before = int(time.time())
        response = site.client.responses.create(model=FAKE_NAME, input="x" * 40)
        assert response.completed_at is not None
        assert before <= response.created_at <= response.completed_at <= time.time()

    @pytest.mark.parametrize(("asked", "served"), [("flex", "flex"), ("priority", "default")])
    def test_the_tier_that_served_it_is_told(self, site: Site, asked: Any, served: str) -> None:
        response = site.client.responses.create(model=FAKE_NAME, input="x", service_tier=asked)
        assert response.service_tier == served

    def test_parse(self, site: Site) -> None:
        said = '{"name": "Ada", "age": 36}'
        response = site.client.responses.parse(model=FAKE_NAME, input=said, text_format=Person)
        assert response.output_parsed == Person(name="Ada", age=36)


class TestStream:
    def test_the_events_are_openais_in_their_order(self, site: Site) -> None:
        events = events_of(site.post({"model": FAKE_NAME, "input": "a 🦜", "stream": True}))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        first = ["created", "in_progress", "output_item.added", "content_part.added"]
        last = ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert kinds[:4] == first
        assert kinds[-4:] == last
        assert set(kinds[4:-4]) == {"output_text.delta"}
        deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
        assert "".join(deltas) == "a 🦜"
        final = events[-1]["response"]
        assert final["output"][0] == events[-2]["item"]
        assert events[-4]["text"] == final["output"][0]["content"][0]["text"] == "a 🦜"
        assert {event["item_id"] for event in events if "item_id" in event} == {
            final["output"][0]["id"]
        }
        assert final["usage"]["output_tokens"] > 0
        assert events[0]["response"]["status"] == "in_progress"

    def test_the_clients_helper(self, site: Site) -> None:
        with site.client.responses.stream(model="acme-adapter", input="hello there") as stream:
            text = "".join(
                event.delta for event in stream if event.type == "response.output_text.delta"
            )
            final = stream.get_final_response()
        assert text == final.output_text == "hello there"

    def test_the_clients_helper_with_a_model(self, site: Site) -> None:
        said = '{"name": "Ada", "age": 36}'
        with site.client.responses.stream(
            model=FAKE_NAME, input=said, text_format=Person
        ) as stream:
            final = stream.get_final_response()
        assert final.output_parsed == Person(name="Ada", age=36)

    async def test_async(self, site: Site) -> None:
        client = AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0)
        stream = await client.responses.create(model=FAKE_NAME, input="hi", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.completed"

    def test_a_cut_stream_is_incomplete(self, site: Site) -> None:
        body = {"model": FAKE_NAME, "input": "abcdef", "stream": True, "max_output_tokens": 3}
        last = events_of(site.post(body))[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}

    def test_a_stream_that_fails_says_so_in_its_last_event(self) -> None:
        body = ResponsesBody(model="m", input="x")
        answer = ResponsesAnswer(body, response_id="resp_1", created=1, model="m", has_tools=False)
        written = b"".join(answer.opening())
        written += answer.failure(Unavailable("lost", code="worker_lost"))
        events = events_of(httpx.Response(200, content=written))
        assert [event["type"] for event in events[2:]] == ["response.failed", "error"]
        assert events[2]["response"]["error"]["message"] == "lost"
        assert events[3]["error"]["code"] == events[3]["code"] == "worker_lost"
        assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]


class TestTools:
    """With a text that looks like calls; tests/conformance has a model write them."""

    SAID = f"{CALL_BEGIN}{CALL}{CALL_END}{CALL_BEGIN}{CALL}{CALL_END}"

    def answer(self) -> ResponsesAnswer:
        body = ResponsesBody.model_validate({"model": "m", "input": "x", "tools": [TOOL]})
        return ResponsesAnswer(body, response_id="resp_1", created=1, model="m", has_tools=True)

    def events(self, said: str, size: int) -> list[TokenEvent]:
        pieces = [said[at : at + size] for at in range(0, len(said), size)]
        made = [TokenEvent(request_id="r", lease=1, seq=0, text=piece) for piece in pieces]
        end = dataclasses.replace(made[-1], finish_reason="stop", usage=Usage(completion_tokens=3))
        return [*made[:-1], end]

    @pytest.mark.parametrize("size", [1, 7, 1000])
    def test_calls_are_items(self, size: int) -> None:
        response = self.answer().whole(self.events(self.SAID, size))
        first, second = response["output"]
        assert (first["type"], first["name"], first["status"]) == (
            *("function_call", "weather", "completed"),
        )
        assert json.loads(second["arguments"]) == {"city": "Köln"}
        assert first["call_id"] != second["call_id"]
        assert response["tools"] == [TOOL]

    @pytest.mark.parametrize("size", [1, 7, 1000])
    def test_streamed_calls_have_their_own_events(self, size: int) -> None:
        answer = self.answer()
        written = b"".join(answer.opening())
        for event in self.events(self.SAID, size):
            written += b"".join(answer.chunks(event))
        events = events_of(httpx.Response(200, content=written))
        for index in (0, 1):
            of_call = [event for event in events if event.get("output_index") == index]
            kinds = [event["type"].removeprefix("response.") for event in of_call]
            assert kinds[0] == "output_item.added"
            assert kinds[-2:] == ["function_call_arguments.done", "output_item.done"]
            assert set(kinds[1:-2]) == {"function_call_arguments.delta"}
            deltas = "".join(event["delta"] for event in of_call[1:-2])
            assert json.loads(deltas) == json.loads(of_call[-2]["arguments"]) == {"city": "Köln"}
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"

    def test_calls_go_back_as_one_message_with_their_results(self) -> None:
        calls = [
            {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": "{}"}
            for call_id in ("call_1", "call_2")
        ]
        output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
        body = ResponsesBody.model_validate({"model": "m", "input": [*calls, output]})
        assistant, tool = chat_body(body).messages
        assert [call.id for call in assistant.tool_calls or ()] == ["call_1", "call_2"]
        assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "call_1", "rain")


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "pmpt_1"}}, "prompt"),
            ({"tools": [{"type": "web_search"}]}, "tools.0"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
                "input.0.content.0",
            ),
            ({"input": []}, "input"),
            ({"temperature": 3}, "temperature"),
            ({"max_tokens": 3}, "max_tokens"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"service_tier": "gold"}, "service_tier"),
            ({"model": "nobodys"}, "model"),
            (
                {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}},
                "text.format.schema",
            ),
            ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
            (
                {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
                "input",
            ),
            ({"input": "x" * 9 * FAKE_CONTEXT}, "input"),
        ],
        ids=str,
    )
    def test_what_is_wrong_is_named(self, site: Site, fields: Any, param: str) -> None:
        answer = site.post({"model": FAKE_NAME, "input": "x", **fields})
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param, answer.text

    def test_none_is_kept(self, site: Site) -> None:
        response = site.client.responses.create(model=FAKE_NAME, input="x", store=True)
        with pytest.raises(openai.NotFoundError):
            site.client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            site.client.responses.cancel(response.id)

    def test_a_wrong_key(self, site: Site) -> None:
        client = OpenAI(base_url=f"{site.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.responses.create(model=FAKE_NAME, input="x")
