"""Samples of Tinker's client: plain completions of the serving engine, whose result is kept.

The process that took the call waits for the answer and keeps it in Redis; while it does, it says so
every few seconds, so that the client of a process that died is told to send the call again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import re
import uuid
from typing import Any

from contract.messages.protocol import FinishReason, GenerateJob, TokenEvent
from controlplane.errors import ApiError, InvalidRequest, NotFound
from controlplane.gateway.door import GatewayRequest
from controlplane.gateway.tinker.bodies import SESSION, Sample
from controlplane.gateway.tinker.wire import write_samples
from controlplane.inference import access
from controlplane.inference.model_selector import ModelSelector
from controlplane.inference.parsing import make_body
from controlplane.inference.schemas import MAX_CHOICES, CompletionBody
from controlplane.inference.service import Generation
from controlplane.training.primitives import calls
from controlplane.training.primitives.calls import Result

log = logging.getLogger(__name__)

#: Seconds for which a call is known to run, and between two times that this is said.
_ALIVE_S, _BEAT_S = 30, 8.0
_SAMPLER = re.compile(rf"({SESSION}):sample:[0-9]{{1,10}}:([A-Za-z0-9_.@-]{{1,200}})")
_running: set[asyncio.Task[None]] = set()


def model_of(sampler_id: str) -> str:
    """Return the model that a sampling session is of. Raises NotFound."""
    match = _SAMPLER.fullmatch(sampler_id)
    if match is None:
        raise NotFound("There is no such sampling session.", param="sampling_session_id")
    return match[2]


async def sample(request: GatewayRequest, body: Sample) -> dict[str, Any]:
    """Have a sample admitted, and wait for it beside the request. -> the client's future."""
    tenant_id, call_id = request.principal.tenant.id, f"{body.sampling_session_id}:{body.seq_id}"
    asked = await _completion(request, body)
    future = {
        "request_id": call_id,
        "sample_sequence_ids": [f"{call_id}:{number}" for number in range(body.num_samples)],
    }
    if await asyncio.to_thread(calls.find, tenant_id, call_id) is not None:
        return future  # the client did not get the first answer
    await asyncio.to_thread(calls.check_room, tenant_id)

    def adjust(job: GenerateJob) -> GenerateJob:
        sampling = job.sampling
        if body.sampling_params.max_tokens is None:
            sampling = dataclasses.replace(sampling, max_tokens=None)
        return dataclasses.replace(job, sampling=sampling, with_end=True)

    generation = await request.admit(asked, endpoint="/tinker/api/v1/asample", adjust=adjust)
    await asyncio.to_thread(calls.note_sample, tenant_id, call_id, None, _ALIVE_S)
    task = asyncio.create_task(_keep(generation, body, tenant_id, call_id))
    _running.add(task)
    task.add_done_callback(_running.discard)
    return future


async def _completion(request: GatewayRequest, body: Sample) -> CompletionBody:
    """Return the completion that a sample stands for. Raises ApiError."""
    given, model = body.sampling_params, model_of(body.sampling_session_id)
    if body.prompt_logprobs_last_n is not None and not body.prompt_logprobs:
        raise InvalidRequest("It needs prompt_logprobs.", param="prompt_logprobs_last_n")
    stop: Any = given.stop
    if isinstance(stop, list) and stop and isinstance(stop[0], int):
        caller = await access.resolve(request.principal, ModelSelector.model(model))
        ends = caller.model.base_model.config.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        if others := [token_id for token_id in stop if token_id not in ends]:
            raise InvalidRequest(
                f"Token {others[0]} does not end this model's answers: send its text instead.",
                param="sampling_params.stop",
            )
        stop = None
    few = body.num_samples <= MAX_CHOICES
    return make_body(
        CompletionBody,
        model=model,
        prompt=body.token_ids if few else [body.token_ids] * body.num_samples,
        n=body.num_samples if few else 1,
        max_tokens=given.max_tokens or 1,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        seed=given.seed,
        stop=stop or None,
        ignore_eos=True if stop == [] else None,
        logprobs=0,
        prompt_logprobs=0 if body.prompt_logprobs else None,
    )


async def _keep(generation: Generation, body: Sample, tenant_id: uuid.UUID, call_id: str) -> None:
    """Wait for the answer and keep it."""
    beat = asyncio.create_task(_say_alive(tenant_id, call_id))
    try:
        result = Result({}, _written([event async for event in generation.events()], body))
    except ApiError as error:
        category = "user" if error.status < 500 else "server"
        result = Result({"error": error.message, "category": category})
    except Exception:
        log.exception("a sample failed")
        result = Result({"error": "The server failed on this sample.", "category": "server"})
    finally:
        beat.cancel()
        generation.leave()
    await asyncio.to_thread(calls.note_sample, tenant_id, call_id, result, calls.DONE_S)


async def _say_alive(tenant_id: uuid.UUID, call_id: str) -> None:
    while True:
        await asyncio.sleep(_BEAT_S)
        try:
            await asyncio.to_thread(calls.note_sample, tenant_id, call_id, None, _ALIVE_S)
        except ApiError as error:
            log.warning("a sample's future could not be kept: %r", error)


def _written(events: list[TokenEvent], body: Sample) -> bytes:
    """Return the answer of all events."""
    is_cut = [True] * body.num_samples
    token_ids: list[list[int]] = [[] for _ in is_cut]
    logprobs: list[list[float]] = [[] for _ in is_cut]
    prompt: list[float] = []
    for event in events:
        for entry in event.logprobs or ():
            token_ids[event.index].append(entry["id"])
            logprobs[event.index].append(entry["logprob"])
        if event.index == 0:
            told = [entry["logprob"] for entry in event.prompt_logprobs or ()]
            prompt += [math.nan if logprob is None else logprob for logprob in told]
        if event.finish_reason is not None:
            is_cut[event.index] = event.finish_reason == FinishReason.LENGTH
    if (last := body.prompt_logprobs_last_n) is not None:
        prompt = [math.nan] * (len(prompt) - last) + prompt[-last:]
    samples = zip(is_cut, token_ids, logprobs, strict=True)
    return write_samples(samples, prompt if body.prompt_logprobs else None)
