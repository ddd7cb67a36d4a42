"""The one way from a checked body to an answer: all generation goes through `submit`.

    caller = await access.resolve(principal, body.selector())
    generation = await submit(caller, body, request_id=new_request_id())
    try:
        async for event in generation.events():      # TokenEvents, each of one choice
            ...
        # or: body = await generation.whole()        # the finished answer, as OpenAI writes it
    finally:
        generation.leave()

`body` is a `ChatBody` or a `CompletionBody` from `schemas` (`parse_body` makes one of JSON), also
where no HTTP request is behind it: /v1/batches submits them with `is_batch`, LoRAX's and the
Responses API translate their own bodies into one. A `VectorBody` is answered with vectors.
Everything that holds for a request holds here: `access.resolve` checks the key's permission and
allowed models, `submit` the tenant's limits and budgets (reserved for all choices before anything
runs, settled by the worker's record), and puts it into the fair queue; it ends in exactly one
DoneRecord.

`submit` raises ApiError if the request is not accepted. Later failures are raised by what is
awaited then, as an ApiError too, with the client's name of the field as `param`.

Always `leave` a Generation in the end, also after an error: that cancels it if it still runs, and
does nothing if it has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from contract.messages.protocol import ErrorCode, FinishReason, GenerateJob, Task, TokenEvent
from controlplane.errors import ApiError, Unavailable
from controlplane.inference.access import Caller, ServedModel
from controlplane.inference.answers import Answer, ChatAnswer, CompletionAnswer, Json
from controlplane.inference.generation import Call, chat_job, client_param, completion_job
from controlplane.inference.json_schema import schema_headers
from controlplane.inference.lifetime import lifetime_headers
from controlplane.inference.schemas import ChatBody, CompletionBody, GenerationBody
from controlplane.inference.vectors import VectorBody, check_task
from controlplane.queue.admission import rate_headers
from controlplane.queue.batch_reply_stream import BatchReplyStream
from controlplane.queue.dispatcher import get_dispatcher
from controlplane.queue.replies import Reply
from controlplane.tenancy.scoping import new_id, tenant_scope
from controlplane.usage.limits.admit import Admitted

#: What may be submitted.
SubmittedBody = ChatBody | CompletionBody | VectorBody


def new_request_id() -> str:
    """Return an id under which a request is logged and billed, and which its client sees."""
    return f"req_{new_id().hex}"


async def submit(
    caller: Caller,
    body: SubmittedBody,
    *,
    request_id: str,
    endpoint: str = "",
    adjust: Callable[[GenerateJob], GenerateJob] | None = None,
    is_batch: bool = False,
    deadline: float | None = None,
    batch_stream: BatchReplyStream | None = None,
) -> Generation:
    """Have a request accepted into the fair queue.

    caller        of the body's `selector`; the use is billed to their API key, or that of a person
                  to their tenant
    request_id    from `new_request_id`; at most one request is accepted under it
    endpoint      the address that the client used, for the log; "": the body's own
    adjust        a last change to the job, for what no field of the body says
    is_batch      served with the capacity that interactive requests leave
    deadline      Unix seconds, when the request is given up; None: `DEADLINE_S` from now
    batch_stream  where it is answered, instead of in this process's own stream: leaving it does not
                  cancel it then, and one that is under way there is not submitted again
    Raises ApiError: InvalidRequest, RateLimited, Conflict, Unavailable; Fenced with a batch_stream.
    """
    assert caller.model.name == body.selector().label, "a caller of another body"
    given, vector = body, body if isinstance(body, VectorBody) else None
    body = body.completion() if isinstance(body, VectorBody) else body
    check_task(caller.model, Task.GENERATE if vector is None else vector.task)
    if caller.model.defaults is not None:
        body = caller.model.defaults.filled(body)
    dispatcher = await get_dispatcher()
    call = Call(
        caller=caller,
        request_id=request_id,
        gateway_id=(batch_stream or dispatcher).gateway_id,
        endpoint=endpoint or given.endpoint,
        is_batch=is_batch or body.is_flex,
        deadline=deadline,
    )
    with tenant_scope(caller.principal.tenant.id):  # whose plans of schemas are kept
        job = chat_job(body, call) if isinstance(body, ChatBody) else completion_job(body, call)
    job = job if vector is None else vector.as_task(job)
    job = job if adjust is None else adjust(job)
    if batch_stream is not None:
        job = batch_stream.as_admitted(job)
    reply, admitted = await dispatcher.submit(
        job,
        caller.limits,
        context_length=caller.model.base_model.context_length,
        batch_stream=batch_stream,
    )
    return Generation(
        job=job,
        body=body,
        vector=vector,
        model=caller.model,
        admitted=admitted,
        reply=reply,
        leave=lambda: dispatcher.replies.leave(reply),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """An accepted request on its way to its answer.

    job       as the worker gets it
    vector    what it answers with vectors, as `body` expresses it; None: it generates
    admitted  what the rate limits' headers say; `headers` has them as text
    leave     ends it, and cancels it if it still runs; call it in the event loop
    """

    job: GenerateJob
    body: GenerationBody
    vector: VectorBody | None
    model: ServedModel
    admitted: Admitted
    reply: Reply
    leave: Callable[[], None]

    @property
    def headers(self) -> dict[str, str]:
        """Return x-ratelimit-… and other headers for an answer over HTTP."""
        headers = rate_headers(self.admitted) | schema_headers(self.job)
        headers |= lifetime_headers(self.model)
        if self.model.alias is not None:
            headers["x-lorikeet-alias-revision"] = str(self.model.alias.number)
            headers["x-lorikeet-alias-target"] = str(self.model.target)
        return headers

    @property
    def served_headers(self) -> dict[str, str]:
        """Return what answers, how long it waited, and where the worker found its adapter.

        The last two are known with the first event, from workers that say them.
        """
        reply, parts = self.reply, [part for part, _ in self.model.parts]
        headers: dict[str, str] = {}
        if parts:
            names = (f"{part.adapter.name}@{part.number}" for part in parts)
            headers["x-lorikeet-version"] = ",".join(names)
            headers["x-lorikeet-digest"] = ",".join(part.digest for part in parts)
        if reply.queue_ms is not None:
            headers["x-lorikeet-queue-ms"] = str(round(reply.queue_ms))
        if reply.tier is not None:
            headers["x-lorikeet-tier"] = reply.tier
        return headers

    def log_fields(self, began: float) -> dict[str, Any]:
        """Return what the request's log line says of it; never its texts.

        began  when it came, in seconds of time.monotonic
        """
        return {"model": self.job.model, "stream": self.job.stream} | self.reply.log_fields(began)

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the weights that answer."""
        parts = self.job.adapters
        if len(parts) > 1:
            digests = " ".join(f"{part.digest} {part.weight}" for part in parts)
            return f"fp_{hashlib.sha256(digests.encode()).hexdigest()[:12]}"
        digest = parts[0].digest if parts else self.model.base_model.revision
        return f"fp_{digest[:12]}"

    async def take(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """Wait for events and return one for each choice that has any; [] if none came in time.

        The last event of the request has `usage`. Raises ApiError when the request failed.
        """
        try:
            events = await self.reply.take(timeout_s)
        except ApiError as error:
            error.param = client_param(self.job, error.param, error.code, self.body)
            raise
        if any(event.finish_reason == FinishReason.CANCELLED for event in events):
            # Its client is still here: the worker took this gateway for dead.
            raise Unavailable("The request was cancelled.", code=ErrorCode.WORKER_LOST)
        return events

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Yield all events. Without `stream` in the body the text comes at the end."""
        while True:
            for event in await self.take():
                yield event
                if event.usage is not None:
                    return

    async def whole(self) -> Json:
        """Return the finished answer as OpenAI writes it."""
        events = [event async for event in self.events()]
        if self.vector is not None:
            return self.vector.answer(self.model, events)
        return self.answer().whole(events)

    def answer(self) -> Answer:
        """Return the writer of this request's events in OpenAI's format."""
        kind, prefix, tier = (
            (ChatAnswer, "chatcmpl", self.body.tier)
            if isinstance(self.body, ChatBody)
            else (CompletionAnswer, "cmpl", None)
        )
        options = self.body.stream_options
        answer = kind(
            answer_id=f"{prefix}-{self.job.request_id.removeprefix('req_')}",
            created=int(self.job.created_at),
            model=self.model.name,
            fingerprint=self.fingerprint,
            with_usage=bool(options and options.shows_usage),
            num_choices=self.job.num_choices,
            has_tools=bool(self.job.tools),
            service_tier=tier,
        )
        answer.is_continuous, answer.per_prompt = self.job.with_counts, self.job.n
        return answer
