"""/tokenize and /detokenize as vLLM has them, at the root and under /v1.

The gateway has no tokenizer: a worker of the base model answers, through the queue like any
request, with the same limits, fairness and deadlines. It is billed as no tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from django.http import HttpResponseBase, JsonResponse
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from contract.messages.protocol import GenerateJob, Task, TokenEvent
from controlplane.errors import PayloadTooLarge, Unavailable
from controlplane.gateway.door import GatewayRequest, gateway_view
from controlplane.inference.bodies import Body, FirstFault, refused
from controlplane.inference.messages import Message
from controlplane.inference.parsing import make_body, parse_body
from controlplane.inference.schemas import (
    MAX_MESSAGES,
    ChatBody,
    CompletionBody,
    ModelName,
    TokenId,
)
from controlplane.inference.tools import MAX_TOOLS, Tool, bounded
from controlplane.tenants.permissions import Permission

MAX_TOKENS = 131_072
#: Bytes of a body, 8 for each token. A longer text would keep a worker busy.
MAX_BODY_BYTES = 1 << 20
#: The most that an older worker, which does not know the task, generates.
_MOST_GENERATED = 1


class TokenizeBody(Body):
    """POST /tokenize: a `prompt`, or the `messages` of a chat."""

    model: ModelName
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=MAX_MESSAGES)] = None
    tools: Annotated[
        Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None, BeforeValidator(bounded)
    ] = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    continue_final_message: Annotated[Any, refused("send the text as prompt")] = None
    chat_template: Annotated[Any, refused("the base model's own is used")] = None
    chat_template_kwargs: Annotated[Any, refused("leave it out")] = None

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("missing", "prompt: required, or messages in its place")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: not allowed with messages: a template adds them")
        if self.messages is None and (self.tools or self.add_generation_prompt is not None):
            raise ValueError("messages: required with tools and add_generation_prompt")
        return self

    def generation(self) -> ChatBody | CompletionBody:
        """Return the request that has this prompt. Raises InvalidRequest."""
        if self.messages is None:
            return make_body(
                CompletionBody,
                model=self.model,
                prompt=self.prompt or "",
                max_tokens=_MOST_GENERATED,
            )
        tools: Any = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()] or None
        return make_body(
            ChatBody,
            model=self.model,
            messages=self.messages,
            tools=tools,  # as they were sent: `bounded` looks at them before they are parsed
            max_tokens=_MOST_GENERATED,
        )


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: ModelName
    tokens: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS), FirstFault]

    def generation(self) -> CompletionBody:
        """Return a request with these tokens as its prompt."""
        return make_body(
            CompletionBody, model=self.model, prompt=self.tokens, max_tokens=_MOST_GENERATED
        )


_B = TypeVar("_B", TokenizeBody, DetokenizeBody)


@gateway_view({"POST": Permission.INFER})
async def tokenize(request: GatewayRequest) -> HttpResponseBase:
    body, generation = await _bodies(request, TokenizeBody)

    def adjust(job: GenerateJob) -> GenerateJob:
        return dataclasses.replace(
            _as_task(job, Task.TOKENIZE),
            special_tokens=body.add_special_tokens is not False,
            generation_prompt=body.add_generation_prompt is not False,
        )

    event, context_length = await _answer(request, generation, adjust)
    token_ids = event.token_ids
    if token_ids is None:
        raise Unavailable("The worker that answered is of an older version.", retry_after_s=5)
    return JsonResponse(
        {
            "count": len(token_ids),
            "max_model_len": context_length,
            "tokens": list(token_ids),
            "token_strs": list(event.token_strs or ()) if body.return_token_strs else None,
        }
    )


@gateway_view({"POST": Permission.INFER})
async def detokenize(request: GatewayRequest) -> HttpResponseBase:
    _, generation = await _bodies(request, DetokenizeBody)
    event, _ = await _answer(request, generation, lambda job: _as_task(job, Task.DETOKENIZE))
    return JsonResponse({"prompt": event.text})


async def _bodies(request: GatewayRequest, kind: type[_B]) -> tuple[_B, ChatBody | CompletionBody]:
    """Read the body, and the request that it stands for."""

    def both(sent: bytes) -> tuple[_B, ChatBody | CompletionBody]:
        if len(sent) > MAX_BODY_BYTES:
            raise PayloadTooLarge(
                f"A body to tokenize has at most {MAX_BODY_BYTES:,} bytes: send it in parts."
            )
        body = parse_body(kind, sent)
        return body, body.generation()

    return await request.parse(both)


def _as_task(job: GenerateJob, task: Task) -> GenerateJob:
    """Return the job as a task of the base model's tokenizer, with no text kept in the log.

    No adapter answers it, so it does not count for an alias's canary or primary.
    """
    return dataclasses.replace(
        job,
        task=task,
        adapters=(),
        alias_revision_id=None,
        alias_target=None,
        json_schema=None,
        decoding_schema=None,
        store=False,
    )


async def _answer(
    request: GatewayRequest,
    body: ChatBody | CompletionBody,
    adjust: Callable[[GenerateJob], GenerateJob],
) -> tuple[TokenEvent, int]:
    """Return the one event that answers, and the model's context in tokens. Raises ApiError."""
    generation = await request.admit(
        body, endpoint=f"/{request.http.path.lstrip('/')}", adjust=adjust
    )
    try:
        events = [event async for event in generation.events()]
    finally:
        generation.leave()
    return events[-1], generation.model.base_model.context_length
