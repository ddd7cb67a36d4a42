"""From a job to the engine's command: prompt to token ids, wire names to the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.channel import Add
from worker.protocol import ErrorCode, GenerateJob
from worker.text import PromptError, TextCodec


class Refused(Exception):
    """The job cannot be run as it is; `param` is the field of the job that is at fault."""

    def __init__(self, code: ErrorCode, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def prompt_token_ids(job: GenerateJob, codec: TextCodec) -> list[int]:
    """The prompt's token ids; takes as long as the prompt is long. Raises Refused."""
    if job.token_ids is not None:
        token_ids, param = list(job.token_ids), "token_ids"
    elif job.messages is None:
        token_ids, param = _text_token_ids(job.text or "", codec), "text"
    else:
        token_ids, param = _chat_token_ids(job.messages, codec), "messages"
    if not token_ids:
        raise Refused(ErrorCode.INVALID_PROMPT, "The prompt is empty.", param)
    if len(token_ids) >= codec.context_length:
        raise _too_long(str(len(token_ids)), codec.context_length, param)
    return token_ids


def _text_token_ids(text: str, codec: TextCodec) -> list[int]:
    _refuse_hopeless(text, codec, "text")
    return codec.encode(text, add_special_tokens=True)


def _chat_token_ids(messages: Sequence[dict[str, Any]], codec: TextCodec) -> list[int]:
    try:
        chat = codec.render(messages)
        _refuse_hopeless(chat.text, codec, "messages")
        return codec.encode_chat(chat)
    except PromptError as error:
        raise Refused(ErrorCode.INVALID_PROMPT, str(error), "messages") from error


def _refuse_hopeless(text: str, codec: TextCodec, param: str) -> None:
    """Raise Refused for a text so long that it is not worth counting exactly."""
    at_least = codec.min_num_tokens(text)
    if at_least >= codec.context_length:
        raise _too_long(f"more than {at_least}", codec.context_length, param)


def _too_long(tokens: str, context_length: int, param: str) -> Refused:
    return Refused(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"This model's context is {context_length} tokens, and at least one must be left for the "
        f"answer; the prompt has {tokens} tokens. Shorten it.",
        param,
    )


def to_add(job: GenerateJob, token_ids: list[int], context_length: int) -> Add:
    """The engine's command. An answer that would overrun the context is cut there."""
    sampling = job.sampling
    room = context_length - len(token_ids)
    return Add(
        request_id=job.request_id,
        tenant_id=job.tenant_id,
        token_ids=token_ids,
        sampling={
            "max_tokens": room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": _logit_bias(sampling.logit_bias),
            "logprobs": sampling.logprobs,
            "ignore_eos": sampling.ignore_eos,
        },
        adapters=tuple((ref.digest, ref.weight) for ref in job.adapters),
        json_schema=job.json_schema,
        deadline=job.deadline,
    )


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except ValueError as error:
        raise Refused(
            ErrorCode.INVALID_REQUEST, "The keys of logit_bias are token ids.", "logit_bias"
        ) from error
