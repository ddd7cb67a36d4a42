"""What a request to an alias becomes: the target, the limits, and the defaults in the job."""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import time
import uuid
from typing import Any

import pytest

from contract.messages.protocol import DoneRecord, GenerateJob, Task
from controlplane.adapters.models import Adapter, BaseModel
from controlplane.aliases import services
from controlplane.aliases.contents import Contents
from controlplane.aliases.models import Alias
from controlplane.errors import InvalidRequest, NotFound, PermissionDenied
from controlplane.gateway.tokenizing import TokenizeBody, _as_task
from controlplane.inference import access, alias_defaults
from controlplane.inference.generation import Call, chat_job, completion_job
from controlplane.inference.model_selector import ModelSelector
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.responses.translation import chat_body
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenants import auth
from controlplane.tenants import services as tenants
from controlplane.tenants.auth import Principal
from controlplane.tenants.key_rules import KeyRules
from controlplane.usage.limits.models import RateLimit
from controlplane.usage.services import usage_settle
from tests.controlplane.aliases.conftest import parts
from tests.controlplane.aliases.test_api import SCHEMA
from tests.controlplane.conftest import Party

PROMPT = "You read invoices."
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def principal(acme: Party, alias: Alias) -> Principal:
    access._names_known.forget(*access._names_known.keys())
    return auth.authenticate(acme.header)


def job_of(principal: Principal, body: ChatBody | CompletionBody) -> GenerateJob:
    """The job as `submit` makes it."""
    caller = access.resolve_now(principal, body.selector())
    if caller.model.defaults is not None:
        body = caller.model.defaults.filled(body)
    call = Call(
        caller=caller,
        request_id="req_1",
        gateway_id="g",
        endpoint="/v1",
        is_batch=False,
        deadline=None,
    )
    return chat_job(body, call) if isinstance(body, ChatBody) else completion_job(body, call)


def chat(**fields: Any) -> ChatBody:
    return ChatBody(**{"model": "prod", "messages": MESSAGES, **fields})


def number(job: GenerateJob) -> int:
    [ref] = job.adapters
    return int(ref.digest[32:], 16)


def test_the_job_tells_the_revision_and_the_target(principal: Principal, alias: Alias) -> None:
    services.alias_ramp(alias=alias, percent=50)
    revision = services.revision_get(alias=alias)
    targets = set()
    for user in range(60):
        job = job_of(principal, chat(user=f"u{user}"))
        assert (job.model, job.alias_revision_id) == ("prod", str(revision.pk))
        assert number(job) == {"primary": 1, "canary": 2}[job.alias_target or ""]
        assert GenerateJob.decode(job.encode()) == job
        targets.add(job.alias_target)
        again = job_of(principal, chat(user=f"u{user}", safety_identifier="else"))
        assert again.alias_target == job.alias_target, "`user` comes first"
    assert targets == {"primary", "canary"}
    assert {job_of(principal, chat()).alias_target for _ in range(9)} <= targets
    plain = job_of(principal, chat(model="invoices"))
    assert (plain.alias_revision_id, plain.alias_target) == (None, None)
    assert b"alias" not in plain.encode()


def test_what_no_adapter_answers_counts_for_no_target(principal: Principal, alias: Alias) -> None:
    services.alias_change(alias=alias, changes={"system_prompt": PROMPT})
    body = TokenizeBody.model_validate({"model": "prod", "messages": MESSAGES}).generation()
    job = _as_task(job_of(principal, body), Task.TOKENIZE)
    assert (job.alias_revision_id, job.alias_target, job.adapters) == (None, None, ())
    assert job.messages is not None and job.messages[0]["content"] == PROMPT


def test_the_record_keeps_them(principal: Principal) -> None:
    job = job_of(principal, chat(user="u"))
    record = DoneRecord.of(
        job, worker_id="w", lease=1, finish_reason="stop", error_code=None, prompt_tokens=1,
        cached_tokens=0, completion_tokens=1, queue_ms=0, load_ms=0, first_token_ms=1, total_ms=2,
    )  # fmt: skip
    old = {name: value for name, value in record.to_dict().items() if "alias" not in name}
    old["request_id"] = "req_of_an_older_worker"
    usage_settle([DoneRecord.decode(record.encode()), DoneRecord.decode(json.dumps(old))])
    row = InferenceRequest.objects.get(request_id="req_1")
    assert str(row.alias_revision_id) == job.alias_revision_id
    assert row.alias_target == job.alias_target
    row = InferenceRequest.objects.get(request_id="req_of_an_older_worker")
    assert (row.alias_revision_id, row.alias_target) == (None, "")


def test_who_is_answered_by_the_canary(principal: Principal, alias: Alias) -> None:
    """By the user that the body names, in any of its words; else by the key."""
    said = [chat(user="a").selector().sticky, chat(safety_identifier="a").selector().sticky]
    said += [chat(prompt_cache_key="a").selector().sticky, chat().selector().sticky]
    assert said == ["user a", "safety_identifier a", "prompt_cache_key a", ""]
    response = ResponsesBody(model="prod", input="x", safety_identifier="a")
    assert chat_body(response).selector().sticky == "safety_identifier a"
    assert CompletionBody(model="prod", prompt="x", user="a").selector().sticky == "user a"
    selectors = {chat(user=name).selector() for name in "ab"}
    assert len(selectors) == 1, "batches look each model up once"


def test_names_of_keys_and_limits(acme: Party, principal: Principal, alias: Alias) -> None:
    services.alias_ramp(alias=alias, percent=50)
    for model in ("prod", "invoices", "invoices@1", "invoices@2", "letters"):
        RateLimit.objects.create(model=model, requests_per_minute=1)
    by_id = {row.id.hex: row.model for row in RateLimit.objects.all()}

    def limited(body: ChatBody) -> set[str]:
        limits = access.resolve_now(principal, body.selector()).limits
        return {by_id[policy.id] for policy in limits.policies}

    found = {frozenset(limited(chat(user=f"u{user}"))) for user in range(60)}
    assert found == {
        frozenset({"prod", "invoices", "invoices@1"}),
        frozenset({"prod", "invoices", "invoices@2"}),
    }
    _, text = tenants.api_key_create(name="narrow", rules=KeyRules(allowed_models=("invoices",)))
    narrow = auth.authenticate(f"Bearer {text}")
    with pytest.raises(PermissionDenied):
        access.resolve_now(narrow, chat().selector())
    _, text = tenants.api_key_create(name="prod", rules=KeyRules(allowed_models=("prod",)))
    access.resolve_now(auth.authenticate(f"Bearer {text}"), chat().selector())


def test_a_schema_for_those_who_say_nothing(principal: Principal, alias: Alias) -> None:
    services.alias_change(alias=alias, changes={"json_schema": SCHEMA})
    job = job_of(principal, chat())
    assert json.loads(job.json_schema or "") == SCHEMA and job.is_strict
    assert job_of(principal, CompletionBody(model="prod", prompt="x")).is_strict
    scored = CompletionBody(model="prod", prompt="x", max_tokens=0, echo=True, logprobs=1)
    assert job_of(principal, scored).json_schema is None
    assert job_of(principal, chat(response_format={"type": "text"})).json_schema is None
    own = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    assert job_of(principal, chat(response_format=own)).json_schema == '{"type":"integer"}'
    assert job_of(principal, chat(regex="a+")).json_schema is None
    with_tools = chat(tools=[{"type": "function", "function": {"name": "f"}}])
    assert job_of(principal, with_tools).is_strict


def test_a_system_prompt_for_those_without_one(principal: Principal, alias: Alias) -> None:
    services.alias_change(alias=alias, changes={"system_prompt": PROMPT})
    first = {"role": "system", "content": PROMPT}
    job = job_of(principal, chat())
    assert job.messages == (first, {"role": "user", "content": "Hello"})
    for role in ("system", "developer"):
        messages = [*MESSAGES, {"role": role, "content": "Own."}]
        assert len(job_of(principal, chat(messages=messages)).messages or ()) == 2
    completion = job_of(principal, CompletionBody(model="prod", prompt="x"))
    assert (completion.text, completion.messages) == ("x", None)


def test_sampling_for_those_who_leave_it_out(principal: Principal, alias: Alias) -> None:
    sampling = {"temperature": 0.2, "top_k": 5, "max_tokens": 40, "stop": ["END"], "seed": 3}
    services.alias_change(alias=alias, changes={"sampling": sampling})
    given = job_of(principal, chat()).sampling
    assert (given.temperature, given.top_k, given.max_tokens) == (0.2, 5, 40)
    assert (given.stop, given.seed) == (("END",), 3)
    own = job_of(principal, chat(temperature=1.0, max_completion_tokens=7)).sampling
    assert (own.temperature, own.max_tokens, own.top_k) == (1.0, 7, 5)
    assert job_of(principal, CompletionBody(model="prod", prompt="x")).sampling.max_tokens == 40
    assert job_of(principal, chat(model="invoices")).sampling.temperature == 1.0


def test_in_a_blend_an_alias_is_its_primary(
    principal: Principal, alias: Alias, adapter: Adapter, letters: Adapter
) -> None:
    services.alias_change(
        alias=alias,
        changes={"primary": parts("invoices@3", "0.5*letters"), "sampling": {"seed": 1}},
    )
    job = job_of(principal, chat())
    targets = {"primary": [3, 1], "canary": [2]}
    assert [int(ref.digest[32:], 16) for ref in job.adapters] == targets[job.alias_target or ""]
    blend = {"model": None, "adapters": [{"name": "prod", "weight": 0.5}, {"name": "invoices"}]}
    for user in range(20):
        job = job_of(principal, chat(**blend, user=f"u{user}"))
        assert [ref.weight for ref in job.adapters] == [0.5, 0.25, 1.0]
        assert (job.alias_target, job.sampling.seed) == (None, None)
    twice = {"model": None, "adapters": [{"name": "prod"}, {"name": "letters"}]}
    with pytest.raises(InvalidRequest, match="`letters` is in the blend twice"):
        job_of(principal, chat(**twice))


def test_an_alias_comes_before_its_adapter(principal: Principal, adapter: Adapter) -> None:
    assert number(job_of(principal, chat(model="invoices"))) == 1
    own = services.alias_create(name="invoices", contents=Contents(primary=parts("invoices@3")))
    assert number(job_of(principal, chat(model="invoices"))) == 3
    assert number(job_of(principal, chat(model="invoices@1"))) == 1, "a number is a number"
    services.alias_delete(alias=own)
    assert number(job_of(principal, chat(model="invoices"))) == 1
    with pytest.raises(NotFound) as caught:
        job_of(principal, chat(model="prodd"))
    assert "Did you mean `prod`?" in caught.value.message
    with pytest.raises(NotFound):
        job_of(principal, chat(model="prod@1"))


def test_what_is_kept_is_bounded(
    principal: Principal, alias: Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alias_defaults._known, "max_bytes", 25_000)
    access.resolve_now(principal, ModelSelector.model("invoices"))
    selectors = [ModelSelector.model(f"long-{index}") for index in range(4)]
    revisions = []
    for index, selector in enumerate(selectors):
        contents = Contents(primary=parts("invoices"), system_prompt=f"{index}" * 10_000)
        services.alias_create(name=f"long-{index}", contents=contents)
        caller = access.resolve_now(principal, selector)
        assert caller.model.defaults is not None and caller.model.alias is not None
        revisions.append(caller.model.alias.revision_id)
        access.resolve_now(principal, selectors[0])
    assert alias_defaults._known.keys() == [revisions[3], revisions[0]], "what is used stays"
    assert alias_defaults._known.num_bytes == 20_000
    # Long texts do not push out what names mean.
    names = [name for _, name in access._names_known.keys()]
    assert names == ["invoices", "long-1", "long-2", "long-3", "long-0"]
    # Keys share the defaults.
    assert principal.api_key is not None
    other = dataclasses.replace(principal, api_key=copy.copy(principal.api_key))
    assert other.api_key is not None
    other.api_key.id = uuid.uuid4()
    access.resolve_now(other, selectors[3])
    assert alias_defaults._known.num_bytes == 20_000


def test_an_alias_adds_microseconds(
    principal: Principal, alias: Alias, base_model: BaseModel
) -> None:
    """To what a request with an adapter's own name takes; generous, for busy machines."""
    sampling = {"temperature": 0.2, "max_tokens": 40}
    services.alias_change(alias=alias, changes={"system_prompt": PROMPT, "sampling": sampling})

    def took(model: str) -> float:
        body = chat(model=model, user="somebody")
        access.resolve_now(principal, body.selector())
        times = []
        for _ in range(300):
            began = time.perf_counter()
            caller = access.known(principal, body.selector())
            assert caller is not None
            if caller.model.defaults is not None:
                caller.model.defaults.filled(body)
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6

    alias_us, adapter_us = took("prod"), took("invoices")
    assert alias_us - adapter_us < 150, (alias_us, adapter_us)
