"""Ask the pool for the answers to cases, and for the log-probability of the expected answers.

The requests go through the fair queue as the tenant's own, after interactive ones; they are limited
and billed like the playground's, under `ENDPOINT`. Answers are greedy, with a seed. An expected
answer is scored by the tokens that training learns: those after the prompt, up to the one that
ends the turn, each given all before it. `worker.training.judging` scores the same tokens:
evaluations with `scored_in` have its scores, and no worker is asked for them (`batch_scores`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from contract.messages.protocol import GenerateJob, Task, TokenEvent
from controlplane.aliases.models import AliasPart
from controlplane.errors import ApiError, Unavailable
from controlplane.evaluations.models import Case, Evaluation
from controlplane.inference import access
from controlplane.inference.access import Caller, ServedModel
from controlplane.inference.model_selector import ModelSelector
from controlplane.inference.parsing import make_body
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.inference.service import new_request_id, submit
from controlplane.queue.dispatcher import close_dispatcher, get_dispatcher
from controlplane.tenants.auth import Principal
from controlplane.tenants.models import Role, Tenant

T = TypeVar("T")
U = TypeVar("U")

#: Name of these requests' address in the request log and in usage.
ENDPOINT = "/api/v1/evaluations"
#: Time limit of one request.
TIMEOUT_S = 120.0
#: Number of cases that are asked at a time.
CONCURRENCY = 8
#: Largest stored length of an answer; the rest is cut off.
MAX_OUTPUT_CHARS = 32_000
_WATCH_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A model's answer to a case; `error`: why there is none."""

    case: Case
    output: str = ""
    finish_reason: str = ""
    error: str = ""
    logprob: float | None = None
    num_tokens: int = 0


class Stopped(Exception):
    """Another process has the evaluation, or it was cancelled."""


def principal_of(tenant: Tenant) -> Principal:
    """Return the tenant itself as a caller, so that no key or session is needed later."""
    return Principal(tenant=tenant, role=Role.DEVELOPER)


def caller_of(principal: Principal, model: str) -> Caller:
    """Return the caller for a model; an alias means its primary. Raises ApiError."""
    caller = access.resolve_now(principal, ModelSelector.model(model))
    alias = caller.model.alias
    if alias is None or caller.model.target == AliasPart.Target.PRIMARY:
        return caller
    served = dataclasses.replace(
        caller.model,
        models=(alias.primary,),
        parts=alias.primary.parts,
        target=AliasPart.Target.PRIMARY,
    )
    return dataclasses.replace(caller, model=served)


def served_name(model: ServedModel) -> str:
    """Return the exact name of the answering model; models that answer alike have the same one."""
    if not model.parts:
        return f"{model.base_model.name} {model.base_model.revision[:12]}"
    name = " + ".join(
        f"{'' if weight == 1.0 else f'{weight:g} * '}{version.adapter.name}@{version.number}"
        for version, weight in model.parts
    )
    return name if model.alias is None else f"{name} by {model.name} r{model.alias.number}"


def ask(
    evaluation: Evaluation, caller: Caller, cases: Sequence[Case], is_held: Callable[[], bool]
) -> list[Asked]:
    """Return the answers to some cases.

    is_held  called every two seconds; once it returns false, nothing more is asked
    Raises ApiError when the pool or a limit refuses for now, Stopped.
    """
    return asyncio.run(_ask(evaluation, caller, cases, is_held))


def texts(caller: Caller, bodies: Sequence[ChatBody]) -> list[str]:
    """Return the answers to some chats. Raises ApiError when one cannot be answered."""

    async def text(body: ChatBody) -> str:
        return "".join(event.text for event in await _events(caller, body))

    return asyncio.run(_together(text, bodies, lambda: True))


async def _ask(
    evaluation: Evaluation, caller: Caller, cases: Sequence[Case], is_held: Callable[[], bool]
) -> list[Asked]:
    return await _together(lambda case: _asked(evaluation, caller, case), cases, is_held)


async def _together(
    work: Callable[[T], Awaitable[U]], given: Sequence[T], is_held: Callable[[], bool]
) -> list[U]:
    await get_dispatcher()
    try:
        places = asyncio.Semaphore(CONCURRENCY)

        async def one(each: T) -> U:
            async with places:
                return await work(each)

        tasks = [asyncio.create_task(one(each)) for each in given]
        try:
            return await _watched(tasks, is_held)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await close_dispatcher()


async def _watched(tasks: list[asyncio.Task[U]], is_held: Callable[[], bool]) -> list[U]:
    left = set(tasks)
    while left:
        done, left = await asyncio.wait(left, timeout=_WATCH_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if left and not await asyncio.to_thread(is_held):
            raise Stopped
    return [task.result() for task in tasks]


async def _asked(evaluation: Evaluation, caller: Caller, case: Case) -> Asked:
    asked, is_answered = Asked(case=case), False
    try:
        if case.checks:
            asked = await _answered(evaluation, caller, case)
            is_answered = True
        if case.expected and evaluation.scored_in is None:
            logprob, num_tokens = await _scored(caller, case)
            asked = dataclasses.replace(asked, logprob=logprob, num_tokens=num_tokens)
    except ApiError as error:
        if error.status >= 500 or error.status in (402, 404, 408, 409, 425, 429):
            raise
        # The expected answer may exceed the context although the generated one did not.
        if not is_answered:
            return dataclasses.replace(asked, error=error.message[:500])
    return asked


async def _answered(evaluation: Evaluation, caller: Caller, case: Case) -> Asked:
    body = make_body(
        ChatBody,
        model=caller.model.name,
        messages=case.messages,
        temperature=0.0,
        seed=evaluation.seed,
        max_tokens=evaluation.max_tokens,
        store=False,
    )
    events = await _events(caller, body)
    text = "".join(event.text for event in events)
    reasons = [event.finish_reason for event in events if event.finish_reason]
    text = text[:MAX_OUTPUT_CHARS].replace("\0", "\ufffd")
    return Asked(case=case, output=text, finish_reason=(reasons or [""])[-1])


async def _scored(caller: Caller, case: Case) -> tuple[float | None, int]:
    """Return the log-probability of the expected answer, and its tokens."""
    answer = {"role": "assistant", "content": case.expected}
    prompt = await _tokens(caller, case.messages, has_more=True)
    whole = await _tokens(caller, [*case.messages, answer], has_more=False)
    first = _common(prompt, whole)
    if first == 0 or first == len(whole):
        return None, 0
    body = make_body(
        CompletionBody,
        model=caller.model.name,
        prompt=whole,
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        store=False,
    )
    events = await _events(caller, body, _without_grammar)
    told = next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None)
    if told is None or len(told) != len(whole):
        raise Unavailable("The worker that answered does not score prompts.")
    values = [float(entry["logprob"]) for entry in told[first : turn_end(told)]]
    return (sum(values), len(values)) if values else (None, 0)


def turn_end(told: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of tokens up to the one that ends the turn.

    Templates write blanks after it. No training shows them to a model (`worker.training.row_tokens`
    leaves them out, too) and no answer has them, so their log-probability is a matter of chance.
    """
    end = len(told)
    while end and told[end - 1]["bytes"] and not told[end - 1]["token"].strip():
        end -= 1  # a special token has no bytes and is not a blank
    return end


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two prompts, in tokens."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))


def _without_grammar(job: GenerateJob) -> GenerateJob:
    """Drop an alias's schema, because the token that is generated here is no answer."""
    return dataclasses.replace(job, json_schema=None, decoding_schema=None, is_strict=False)


async def _tokens(caller: Caller, messages: list[Any], *, has_more: bool) -> list[int]:
    body = make_body(
        ChatBody, model=caller.model.name, messages=messages, max_tokens=1, store=False
    )

    def tokenized(job: GenerateJob) -> GenerateJob:
        # No adapter answers it, so it does not count for an alias's targets.
        return dataclasses.replace(
            _without_grammar(job),
            task=Task.TOKENIZE,
            generation_prompt=has_more,
            adapters=(),
            alias_revision_id=None,
            alias_target=None,
        )

    events = await _events(caller, body, tokenized)
    found = events[-1].token_ids
    assert found is not None
    return list(found)


async def _events(
    caller: Caller,
    body: ChatBody | CompletionBody,
    adjust: Callable[[GenerateJob], GenerateJob] | None = None,
) -> list[TokenEvent]:
    generation = await submit(
        caller,
        body,
        request_id=new_request_id(),
        endpoint=ENDPOINT,
        adjust=adjust,
        is_batch=True,
        deadline=time.time() + TIMEOUT_S,
    )
    events: list[TokenEvent] = []

    async def read() -> None:
        async for event in generation.events():
            events.append(event)

    try:
        await _within(read(), TIMEOUT_S + 5)
    finally:
        generation.leave()
    return events


async def _within(work: Awaitable[None], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError as error:
        raise Unavailable("No worker answered in time: try again later.") from error
