"""Answers jobs that ask for tokens or for their text, and generate nothing."""

from __future__ import annotations

from typing import Any

from contract.messages.protocol import ErrorCode, GenerateJob, Task
from engine.text.codec import TextCodec
from worker.errors import Refused
from worker.serving.engine_commands import chat_token_ids

#: Largest number of tokens of one answer; as many as the longest usual context.
MAX_TOKENS = 131_072
#: Largest number of characters of a text, since tokenizing takes time proportional to its length.
MAX_CHARS = 8 * MAX_TOKENS


def answer_of(job: GenerateJob, codec: TextCodec) -> dict[str, Any]:
    """Return the fields of the job's event, in time proportional to its prompt; raise Refused."""
    if job.task == Task.DETOKENIZE:
        return {"text": _text_of(job, codec)}
    if job.messages is not None:
        token_ids = chat_token_ids(job, codec, max_tokens=MAX_TOKENS)
    else:
        text = job.text or ""
        if len(text) > MAX_CHARS or codec.min_num_tokens(text) > MAX_TOKENS:
            raise _too_many("text")
        token_ids = codec.encode(text, add_special_tokens=job.special_tokens)
    if len(token_ids) > MAX_TOKENS:
        raise _too_many("text" if job.messages is None else "messages")
    return {"token_ids": tuple(token_ids), "token_strs": tuple(codec.names(token_ids))}


def _text_of(job: GenerateJob, codec: TextCodec) -> str:
    token_ids = job.token_ids or ()
    if len(token_ids) > MAX_TOKENS:
        raise _too_many("token_ids")
    worst = max(token_ids, default=0)
    if worst >= codec.vocab_size:
        raise Refused(
            ErrorCode.INVALID_PROMPT,
            f"There is no token {worst}: the vocabulary has {codec.vocab_size}.",
            "token_ids",
        )
    return codec.decode_whole(token_ids)


def _too_many(param: str) -> Refused:
    message = f"This has more than {MAX_TOKENS:,} tokens, the most that one request may have."
    return Refused(ErrorCode.INVALID_PROMPT, message, param)
