"""What proves too much ends in its own process, with its own request; others never notice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contract.messages.protocol import ErrorCode
from engine.dash.answer_check import make_check
from engine.grammar_text import Grammar, GrammarKind
from engine.request import Request, SamplingParams
from tests.tiny_base import write_tiny_base
from worker.errors import Refused
from worker.grammar import sandbox_process as sandbox_module
from worker.grammar import service as grammars_module
from worker.grammar.answer_check import set_up
from worker.grammar.sandbox_process import Done, SandboxLost, SandboxProcess
from worker.grammar.service import GrammarService

BOMB = json.dumps({"type": "integer", "multipleOf": 10_000_019})
SMALL = json.dumps({"type": "integer", "minimum": 3})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def grammars(tiny: Path) -> AsyncIterator[GrammarService]:
    made = GrammarService(tiny)
    yield made
    made.stop()


def add(tenant: str = "t", **grammar: str) -> Request:
    sampling = SamplingParams()
    return Request(request_id="r", tenant_id=tenant, token_ids=[1], sampling=sampling, **grammar)


async def refusal(grammars: GrammarService, request: Request) -> Refused:
    with pytest.raises(Refused) as caught:
        await grammars.admit(request)
    return caught.value


async def test_a_bomb_ends_alone_and_is_not_tried_twice(grammars: GrammarService) -> None:
    await grammars.start()
    bomb = asyncio.create_task(refusal(grammars, add("bomber", json_schema=BOMB)))
    await asyncio.sleep(0.1)
    await grammars.admit(add("other", json_schema=SMALL))  # by a new process
    refused = await bomb
    assert refused.code == ErrorCode.INVALID_RESPONSE_FORMAT
    assert "longer than 2 s" in refused.message
    process = grammars._trial._process
    await refusal(grammars, add("bomber", json_schema=BOMB))
    assert grammars._trial._process is process  # a second try would have ended it


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ({"json_schema": '{"type":"integer","minimum":2,"maximum":1}'}, "Unsatisfiable"),
        ({"json_schema": '{"type":"array","uniqueItems":true}'}, "uniqueItems"),
        ({"json_schema": "["}, "not JSON"),
        ({"regex": "("}, "cannot be enforced"),
        ({"lark": "nothing"}, "cannot be enforced"),
    ],
    ids=["impossible", "unknown keyword", "no JSON", "regex", "lark"],
)
async def test_what_the_decoder_refuses(
    grammars: GrammarService, grammar: dict[str, str], problem: str
) -> None:
    refused = await refusal(grammars, add(**grammar))
    assert refused.code == ErrorCode.INVALID_RESPONSE_FORMAT
    assert problem in refused.message
    assert refused.param in grammar


async def test_what_one_tenant_compiled_is_new_to_another(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the other waits for it: else the time would tell what another tenant uses."""
    tried: list[str] = []

    async def slow(grammar: Grammar, cpu_s: float) -> Done:
        await asyncio.sleep(0.02)
        tried.append(grammar.text)
        return Done(None, 0.02)

    monkeypatch.setattr(grammars._trial, "call", slow)
    commands = [add(tenant, regex="x") for tenant in ("a", "a", "b")]
    await asyncio.gather(*(grammars.admit(command) for command in commands))
    assert tried == ["x", "x"]
    await grammars.admit(add("b", regex="x"))
    await grammars.admit(add("c", regex="x"))
    assert tried == ["x"] * 3


def test_the_check_of_an_answer_keeps_nothing_of_it() -> None:
    """One process checks all tenants' answers: the next one may be another tenant's."""
    check = set_up()
    first: list[float] = []
    again: list[float] = []
    for number in range(5):
        names = [f"{'abcdefgh' * 3}{number}x{n}" for n in range(20)]
        properties = {name: {"pattern": f"^{name}[0-9]{{1,60}}$"} for name in names}
        schema = json.dumps({"properties": properties, "additionalProperties": {"format": "regex"}})
        answer = json.dumps({name: f"{name}1" for name in names} | {"said": f"{names[0]}?"})
        for times in (first, again):
            began = time.thread_time()
            assert check(schema, answer) is None
            times.append(time.thread_time() - began)
    assert min(again) > 0.6 * min(first)
    check(SMALL, "3")
    kept = str([*re._cache, *getattr(re, "_cache2", ())])  # type: ignore[attr-defined]
    assert "abcdefgh" not in kept


async def test_tenants_take_turns(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant's many grammars put off another's by one of them at most."""
    order: list[str] = []

    async def slow(grammar: Grammar, cpu_s: float) -> Done:
        await asyncio.sleep(0.01)
        order.append(grammar.text)
        return Done(None, 0.01)

    monkeypatch.setattr(grammars._trial, "call", slow)
    many = [asyncio.create_task(grammars.admit(add("a", regex=f"a{i}"))) for i in range(5)]
    await asyncio.sleep(0)
    await grammars.admit(add("b", regex="b"))
    assert order.index("b") <= 2
    await asyncio.gather(*many)


async def test_a_tenants_time_for_new_grammars_is_bounded(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "QUOTA_S", 0.05)
    monkeypatch.setattr(grammars_module, "QUOTA_WINDOW_S", 1.0)

    async def slow(grammar: Grammar, cpu_s: float) -> Done:
        return Done(None, 0.1)

    monkeypatch.setattr(grammars._trial, "call", slow)
    await grammars.admit(add("a", regex="1"))
    assert (await refusal(grammars, add("a", regex="2"))).code == ErrorCode.GRAMMAR_QUOTA
    await grammars.admit(add("a", regex="1"))  # is known
    await grammars.admit(add("b", regex="2"))
    await asyncio.sleep(1.0)
    await grammars.admit(add("a", regex="3"))


async def test_many_who_want_the_same_wait_for_one_trial(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    async def counted(*job: Grammar, cpu_s: float) -> Done:
        calls.append(job)
        await asyncio.sleep(0.01)
        return Done(None, 0.01)

    monkeypatch.setattr(grammars._trial, "call", counted)
    await asyncio.gather(*(grammars.admit(add("t", regex="x")) for _ in range(20)))
    assert calls == [(Grammar(GrammarKind.REGEX, "x"),)]


@pytest.mark.parametrize(
    ("schema", "answer", "problem"),
    [
        ({"type": "object", "properties": {"a": {"multipleOf": 0.1}}}, '{"a": 0.3}', None),
        ({"uniqueItems": True}, "[1, 1.0]", "non-unique"),
        ({"additionalProperties": False, "patternProperties": {"^a": {}}}, '{"ab": 1}', None),
        ({"additionalProperties": {"type": "null"}}, '{"ab": 1}', "at /ab"),
        ({"patternProperties": {"^a": {"type": "null"}}}, '{"ab": 1}', "at /ab"),
        ({"pattern": "^(a+)+$"}, json.dumps("a" * 30_000 + "b"), "no match"),
        ({"format": "date"}, '"2023-02-29"', "'date'"),
        ({}, "NaN", "not JSON"),
        ({}, "[" * 20_000, "not JSON"),
        ({}, "1" * 6_000, "not JSON"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, "2", "1 was expected"),
        ({"multipleOf": 0.1}, "1" * 40, None),
        ({"multipleOf": 0.1}, "1" * 40 + ".05", "not a multiple of 0.1"),
        ({"multipleOf": 3}, "3e40", None),
        ({"multipleOf": 3}, "1e999999999999", "not a multiple of 3"),
        ({"multipleOf": 0.5}, "1.000", None),
        ({"multipleOf": 0.5}, "5e-999999999999", "not a multiple of 0.5"),
        ({"multipleOf": 0.5}, "-0e-999999999999", None),
        ({"minimum": 1, "multipleOf": 2}, "1e" + "9" * 30, None),
        ({"exclusiveMinimum": 0, "maximum": 1e-300}, "1E-" + "9" * 30, None),
        ({"exclusiveMinimum": 0}, "0e" + "9" * 30, "less than or equal to"),
        ({"$dynamicRef": "#nowhere"}, "1", None),
        ({"multipleOf": 0.07}, "0.21", None),
        ({"multipleOf": 1e-7}, "0.00000015", "not a multiple of 1E-7"),
        ({"type": "integer"}, "1.0", None),
        ({"format": "time"}, '"15:59:60-08:00"', None),  # a leap second ends a day of UTC
        ({"format": "time"}, '"12:59:60Z"', "'time'"),
        ({"format": "date-time"}, '"2023-02-29T00:00:00Z"', "'date-time'"),
        ({"format": "json-pointer"}, '"/a~2"', "'json-pointer'"),
        ({"format": "regex"}, json.dumps(r"(?<y>\p{L})(?=a)"), None),
        ({"format": "regex"}, '"(?P<y>a)"', "'regex'"),
        ({"pattern": r"^\p{L}{2}$"}, '"\u00e9\u65e5"', None),
        ({"pattern": "^a$"}, r'"\ud800"', "no match"),
        # Nobody knows whether such a pattern matches a name: it forbids nothing.
        ({"patternProperties": {"(?=a)b": {"type": "null"}}}, '{"x": 1}', None),
        ({"additionalProperties": False, "patternProperties": {"(?=a)b": {}}}, '{"x": 1}', None),
        ({"unevaluatedProperties": False, "patternProperties": {r"\p{L}": {}}}, '{"x": 1}', None),
    ],
    ids=range(36),
)
def test_finished_answers_are_checked(
    schema: dict[str, Any], answer: str, problem: str | None
) -> None:
    started = time.process_time()
    found = make_check()(json.dumps(schema), answer)
    assert time.process_time() - started < grammars_module.CHECK_CPU_S
    assert found is None if problem is None else problem in (found or "")


async def test_a_check_that_takes_long_is_given_up(grammars: GrammarService) -> None:
    part: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/n30"}}
    defs: dict[str, Any] = {"n0": {"type": "string"}}
    for i in range(1, 31):
        both = {"$ref": f"#/$defs/n{i - 1}"}
        defs[f"n{i}"] = {"anyOf": [both, both]}
    slow = json.dumps({"$defs": defs, **part})
    assert "longer than" in (await grammars.problem_of(slow, "[1]", "t") or "")
    assert "too long" in (await grammars.problem_of(slow, "[1]", "t") or "")
    assert await grammars.problem_of(SMALL, "5", "t") is None


async def test_a_deep_answer_is_checked(grammars: GrammarService) -> None:
    inner = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    schema = json.dumps({"type": "object", "properties": {"a": inner}, "required": ["a"]})
    deep, deeper = ('{"a":' * depth + "%s" + "}" * depth for depth in (400, 5000))
    assert await grammars.problem_of(schema, deep % "null", "t") is None
    assert "at /a: " in (await grammars.problem_of(schema, deep % "5", "t") or "")
    assert "too deeply" in (await grammars.problem_of(schema, deeper % "null", "t") or "")
    assert await grammars.problem_of(SMALL, "5", "t") is None


async def test_a_check_on_a_machine_that_gives_it_no_time_is_not_given_up(
    grammars: GrammarService,
) -> None:
    """What counts is what the check costs, not how long its process waits for a processor."""
    await grammars.start()
    stopped = grammars._check._process.pid
    os.kill(stopped, signal.SIGSTOP)
    check = asyncio.create_task(grammars.problem_of(SMALL, "5", "t"))
    await asyncio.sleep(2.5 * grammars_module.CHECK_CPU_S)
    os.kill(stopped, signal.SIGCONT)
    assert await check is None
    assert await grammars.problem_of(SMALL, "1", "t") is not None


async def test_a_trial_on_a_machine_that_gives_it_no_time_costs_its_tenant_nothing(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "QUOTA_S", 1.0)
    await grammars.start()
    stopped = grammars._trial._process.pid
    os.kill(stopped, signal.SIGSTOP)
    trial = asyncio.create_task(grammars.admit(add("a", json_schema=SMALL)))
    await asyncio.sleep(1.25 * grammars_module.TRIAL_CPU_S)
    os.kill(stopped, signal.SIGCONT)
    await trial
    await grammars.admit(add("a", regex="b"))


async def test_a_helper_that_is_frozen_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "FROZEN_S", 0.3)
    helper = SandboxProcess("eater", _eats, 1, memory_bytes=64 << 20)
    try:
        await helper.start()
        os.kill(helper._process.pid, signal.SIGSTOP)
        with pytest.raises(SandboxLost, match="too little time") as caught:
            await helper.call(1, cpu_s=10)
        assert caught.value.cpu_s < 0.01
        monkeypatch.undo()
        assert (await helper.call(7, cpu_s=10)).value == 7
    finally:
        helper.stop()


def _turns(count: int) -> int:
    while count:  # of the interpreter, or of one that is left and never comes back to it
        count -= 1
    return pow(7, 1 << 40)


def _turns_set_up() -> Any:
    return _turns


async def test_what_was_all_but_frozen_counts_with_the_time_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox_module, "FROZEN_S", 1.0)
    helper = SandboxProcess("turner", _turns_set_up, memory_bytes=64 << 20)
    try:
        await helper.start()
        with pytest.raises(SandboxLost, match="too little time") as caught:
            await helper.call(10**12, cpu_s=30)
        assert 0.0 < caught.value.cpu_s < 2
    finally:
        helper.stop()


@pytest.mark.parametrize("count", [10**12, 0], ids=["in Python", "in C"])
async def test_processor_time_runs_out_wherever_it_is_spent(count: int) -> None:
    helper = SandboxProcess("turner", _turns_set_up, memory_bytes=1 << 40)
    try:
        with pytest.raises(SandboxLost, match=r"longer than 0.2 s of processor time") as caught:
            await helper.call(count, cpu_s=0.2)
        assert caught.value.cpu_s == 0.2
    finally:
        helper.stop()


async def test_each_job_has_its_own_processor_time() -> None:
    helper = SandboxProcess("counter", _counts_set_up, memory_bytes=64 << 20)
    try:
        first = await helper.call(0.3, cpu_s=0.5)
        second = await helper.call(0.3, cpu_s=0.5)
        assert first.value == second.value  # one process
        assert 0.3 <= first.cpu_s < 0.5
    finally:
        helper.stop()


def _counts(cpu_s: float) -> int:
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass
    return os.getpid()


def _counts_set_up() -> Any:
    return _counts


async def test_tenants_take_turns_at_checks(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    async def slow(schema: str, answer: str, cpu_s: float) -> Done:
        await asyncio.sleep(0.01)
        order.append(answer)
        return Done(None, 0.01)

    monkeypatch.setattr(grammars._check, "call", slow)
    many = [asyncio.create_task(grammars.problem_of("{}", f"a{i}", "a")) for i in range(8)]
    await asyncio.sleep(0)
    await grammars.problem_of("{}", "b", "b")
    assert order.index("b") <= 2
    await asyncio.gather(*many)


async def test_what_was_given_up_is_tried_again_later(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have met a frozen machine."""
    monkeypatch.setattr(grammars_module, "RETRY_S", 0.2)
    is_busy = True

    async def call(*job: str, cpu_s: float) -> Done:
        if is_busy:
            raise SandboxLost("the machine gave it too little time")
        return Done(None, 0.0)

    monkeypatch.setattr(grammars._trial, "call", call)
    monkeypatch.setattr(grammars._check, "call", call)
    await refusal(grammars, add(regex="x"))
    assert await grammars.problem_of("{}", "1", "t") is not None
    is_busy = False
    await refusal(grammars, add(regex="x"))
    assert await grammars.problem_of("{}", "1", "t") is not None
    await asyncio.sleep(0.2)
    await grammars.admit(add(regex="x"))
    assert await grammars.problem_of("{}", "1", "t") is None


async def test_who_waits_for_a_helper_that_cannot_be_started_is_told(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", no_memory)
    refused = await asyncio.wait_for(refusal(grammars, add(regex="x")), timeout=5)
    assert "cannot be started" in refused.message


async def test_who_waits_for_a_trial_that_fails_unforeseen_is_told(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file() -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(grammars._trial, "_started", no_file)
    refused = await asyncio.wait_for(refusal(grammars, add(regex="x")), timeout=5)
    assert "could not be tried" in refused.message


def _eats(num_bytes: int) -> Any:
    def eat(count: int) -> int:
        return len(bytes(count * num_bytes))

    return eat


async def test_a_helper_that_needs_too_much_memory_is_replaced() -> None:
    helper = SandboxProcess("eater", _eats, 1 << 20, memory_bytes=64 << 20)
    try:
        assert (await helper.call(8, cpu_s=10)).value == 8 << 20
        with pytest.raises(SandboxLost, match="memory"):
            await helper.call(256, cpu_s=10)
        assert (await helper.call(8, cpu_s=10)).value == 8 << 20
    finally:
        helper.stop()


def _fails(number: int) -> tuple[int, float]:
    return os.getpid(), 1 / number


def _fails_set_up() -> Any:
    return _fails


async def test_a_job_that_fails_costs_the_next_no_process() -> None:
    helper = SandboxProcess("failing", _fails_set_up, memory_bytes=64 << 20)
    try:
        before = (await helper.call(1, cpu_s=10)).value
        with pytest.raises(SandboxLost, match="ZeroDivisionError"):
            await helper.call(0, cpu_s=10)
        assert (await helper.call(1, cpu_s=10)).value == before
    finally:
        helper.stop()


async def test_a_cancelled_job_leaves_no_answer_behind() -> None:
    helper = SandboxProcess("eater", _eats, 1, memory_bytes=1 << 30)
    try:
        job = asyncio.create_task(helper.call(500_000_000, cpu_s=10))
        await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert (await helper.call(7, cpu_s=30)).value == 7
    finally:
        helper.stop()
