"""Ask a worker of the pool for the log-probabilities of the probe's prompts.

The requests go through the fair queue as the tenant's, like any other, so a probe tests the serving
path. They are not billed: the accountant drops their records by their `endpoint`; no limit and no
budget counts them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from contract.adapters.inspection import PROBE_ENDPOINT, TOP
from contract.messages.protocol import AdapterRef, GenerateJob, Sampling, TokenEvent
from controlplane.adapters.models import AdapterVersion
from controlplane.errors import Unavailable
from controlplane.evaluations.inspections.comparison import Scores
from controlplane.queue.dispatcher import Dispatcher, close_dispatcher, get_dispatcher
from controlplane.queue.workers import has_copies, precisions
from controlplane.tenancy.scoping import new_id

#: Time limit of the answer to a probe.
TIMEOUT_S = 60.0

Prompts = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The answer of a worker.

    workers       those of the base model: one of them answered
    devices       that these compute on
    precisions    see `controlplane.queue.workers.precisions`
    load_ms       time to load the adapter, from its files to the device; 0 if an old worker had it
    device_bytes  the adapter's memory on the device; None: the worker does not report it
    """

    scores: Scores
    workers: tuple[str, ...]
    devices: tuple[str, ...]
    precisions: list[dict[str, str]]
    load_ms: float
    device_bytes: int | None


class Answers(NamedTuple):
    """Workers' answers with an adapter's original, of the base alone, and with the copy in FP8.

    copy  None: not all workers of the base model keep adapters in FP8
    """

    original: Served
    base: Served
    copy: Served | None


def ask(version: AdapterVersion, digest: str, prompts: Prompts) -> Answers:
    """Ask a worker to answer with the adapter, without it, and with its copy.

    version  with its adapter and base model
    digest   where its checked files are
    Raises ApiError: Unavailable when no worker answers, others when a worker refuses the adapter.
    """
    return asyncio.run(_ask(version, digest, prompts))


async def _ask(version: AdapterVersion, digest: str, prompts: Prompts) -> Answers:
    dispatcher = await get_dispatcher()
    try:
        job = _job(version, digest, prompts, dispatcher.gateway_id)
        base = dataclasses.replace(
            job, adapters=(), adapter_version_id=None, request_id=_request_id()
        )
        served, alone = await _answer(dispatcher, job), await _answer(dispatcher, base)
        if not has_copies(served.precisions):
            return Answers(served, alone, None)
        copy = dataclasses.replace(
            job,
            adapters=tuple(dataclasses.replace(ref, in_fp8=True) for ref in job.adapters),
            request_id=_request_id(),
        )
        return Answers(served, alone, await _answer(dispatcher, copy))
    finally:
        await close_dispatcher()


def _request_id() -> str:
    return f"probe_{new_id().hex}"


def _job(version: AdapterVersion, digest: str, prompts: Prompts, gateway_id: str) -> GenerateJob:
    kept = AdapterVersion(tenant_id=version.tenant_id, digest=digest)
    ref = AdapterRef(
        digest=digest,
        config_key=kept.config_key,
        tensors_key=kept.tensors_key,
        num_bytes=version.num_bytes,
    )
    now = time.time()
    return GenerateJob(
        request_id=_request_id(),
        tenant_id=str(version.tenant_id),
        api_key_id="",
        gateway_id=gateway_id,
        model=f"{version.adapter.name}@{version.number}",
        base_model=version.adapter.base_model.name,
        adapters=(ref,),
        adapter_version_id=str(version.pk),
        prompts=tuple(tuple(prompt) for prompt in prompts),
        sampling=Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=TOP),
        endpoint=PROBE_ENDPOINT,
        store=False,
        created_at=now,
        deadline=now + TIMEOUT_S,
    )


async def _answer(dispatcher: Dispatcher, job: GenerateJob) -> Served:
    reply, _ = await dispatcher.submit(job)
    found: dict[int, tuple[dict[str, Any], ...]] = {}
    last: TokenEvent | None = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while last is None:
                for event in await reply.take():
                    if event.prompt_logprobs is not None:
                        found[event.index] = event.prompt_logprobs
                    if event.usage is not None:
                        last = event
    except TimeoutError as error:
        raise Unavailable("No worker answered the probe in time.") from error
    finally:
        dispatcher.replies.leave(reply)
    try:
        scores = _scores([found[index] for index in range(len(job.prompts))])
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable("The worker's answer to the probe is not complete.") from error
    beats = [worker.heartbeat for worker in dispatcher.workers.statuses if worker.is_alive]
    beats = [beat for beat in beats if beat.base_model == job.base_model]
    return Served(
        scores=scores,
        workers=tuple(sorted(beat.worker_id for beat in beats)),
        devices=tuple(sorted({beat.device for beat in beats})),
        precisions=precisions(beats),
        load_ms=(last.load_ms or 0.0) + (last.adapter_load_ms or 0.0),
        device_bytes=last.adapter_bytes,
    )


def _scores(prompts: list[tuple[dict[str, Any], ...]]) -> Scores:
    return Scores(
        logprobs=[[float(entry["logprob"]) for entry in prompt[1:]] for prompt in prompts],
        top=[
            {int(entry["id"]): float(entry["logprob"]) for entry in prompt[-1]["top_logprobs"]}
            for prompt in prompts
        ],
    )
