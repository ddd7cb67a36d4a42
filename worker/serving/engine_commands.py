"""Turns a job into the engine's requests: prompts to token ids, wire names to the engine's names.

A request of the engine has one prompt, so a job with several prompts becomes several requests,
named by `engine_ids`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from contract.messages.protocol import ErrorCode, GenerateJob, Sampling
from engine.request import AdapterPart, Priority, Request, SamplingParams
from engine.text.chat_rendering import render_chat
from engine.text.chat_template import PromptError
from engine.text.codec import TextCodec
from worker.errors import Refused
from worker.grammar.answers import answer_grammar

#: Largest number of prompts' log-probabilities in one request: they are written all at once, and
#: the worker does nothing else during that time.
MAX_PROMPT_LOGPROBS = 100_000
#: Largest number of tokens in all prompts of a request whose client wants to see their ids.
MAX_SHOWN_IDS = 200_000
#: Beginnings of messages that a tokenizer joins with the text before them in different ways.
_FIRST_WORDS = ("a", " Z", "\n\n", "0", "(", "\N{CJK UNIFIED IDEOGRAPH-4E2D}")
#: Fields that have the same name and meaning on the wire and in the engine.
_AS_THEY_ARE = {field.name for field in dataclasses.fields(Sampling)}.intersection(
    field.name for field in dataclasses.fields(SamplingParams)
) - {"max_tokens", "logit_bias", "prompt_logprobs"}


class Prompt(NamedTuple):
    """One prompt of a job.

    text   the text that an echo shows
    spans  where in the text each token is; None: it follows from the tokens' bytes
    """

    token_ids: list[int]
    text: str = ""
    spans: list[tuple[int, int]] | None = None


class EngineId(NamedTuple):
    """The engine's id for one prompt of a job.

    It has the lease, since a worker may get a request again while its engine still runs an earlier
    attempt.
    """

    request_id: str
    lease: int
    prompt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.lease}.{self.prompt}"

    @classmethod
    def parse(cls, engine_id: str) -> EngineId:
        request_id, _, rest = engine_id.rpartition("#")
        lease, _, prompt = rest.partition(".")
        return cls(request_id, int(lease), int(prompt))


def engine_ids(job: GenerateJob, lease: int) -> list[str]:
    """Return the engine's ids for the job's prompts."""
    return [str(EngineId(job.request_id, lease, prompt)) for prompt in range(len(job.prompts) or 1)]


def read_prompts(job: GenerateJob, codec: TextCodec) -> list[Prompt]:
    """Tokenize the job's prompts, in time proportional to their length; raise Refused."""
    if job.messages is not None:
        token_ids = chat_token_ids(job, codec)
        if codec.thoughts is not None and not job.thinks:
            # A grammar binds from the first token: a thought that the template began ends here.
            token_ids += codec.encode(codec.thoughts.skipped(token_ids), add_special_tokens=False)
        return [_checked(Prompt(token_ids), "messages", codec)]
    given: Sequence[Any] = job.prompts or [job.text if job.token_ids is None else job.token_ids]
    prompts = [_raw_prompt(prompt, codec, job.truncate) for prompt in given]
    if job.with_token_ids and sum(len(prompt.token_ids) for prompt in prompts) > MAX_SHOWN_IDS:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"The prompts have more than {MAX_SHOWN_IDS:,} tokens together, too many to show.",
            "return_token_ids",
        )
    return prompts


def _raw_prompt(
    given: str | Sequence[int] | None, codec: TextCodec, truncate: int | None
) -> Prompt:
    if given is None or isinstance(given, str):
        text = given or ""
        if truncate is not None:
            return _checked(Prompt(_last_token_ids(text, truncate, codec), text), "text", codec)
        _refuse_hopeless(text, codec, "text")
        token_ids, spans = codec.encode_spans(text)
        return _checked(Prompt(token_ids, text, spans), "text", codec)
    token_ids = list(given)
    return _checked(Prompt(token_ids, codec.decode(token_ids)), "token_ids", codec)


def _checked(prompt: Prompt, param: str, codec: TextCodec) -> Prompt:
    num_tokens = len(prompt.token_ids)
    if not num_tokens:
        raise Refused(ErrorCode.INVALID_PROMPT, "The prompt is empty.", param)
    if num_tokens >= codec.context_length:
        raise _too_long(str(num_tokens), codec.context_length, param)
    return prompt


def _last_token_ids(text: str, number: int, codec: TextCodec) -> list[int]:
    """Return the text's last tokens; read only as much text as this number of tokens can have."""
    end = text[-codec.max_num_chars(number) :]
    return codec.encode(end, add_special_tokens=True)[-number:]


def chat_token_ids(
    job: GenerateJob, codec: TextCodec, *, max_tokens: int | None = None
) -> list[int]:
    """Return the tokens of the job's chat; with `room`, of as many of its last turns as fit.

    max_tokens  a longer chat is refused without counting exactly; None: the context's length

    Raises Refused.
    """
    messages = job.messages or ()
    if job.room is None:
        return _rendered(messages, job, codec, max_tokens)
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    starts = sorted({0, *turns})
    # Fewer turns have fewer tokens, so a binary search finds the first start that fits.
    at = bisect.bisect_left(
        starts, True, hi=len(starts) - 1, key=lambda start: _fits(messages, start, job, codec)
    )
    return _rendered(_from(messages, starts[at]), job, codec)


def _fits(
    messages: Sequence[dict[str, Any]], start: int, job: GenerateJob, codec: TextCodec
) -> bool:
    try:
        number = len(_rendered(_from(messages, start), job, codec))
    except Refused as refused:
        if refused.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED:
            return False
        raise  # any other problem does not depend on the start
    return number <= codec.context_length - min(job.room or 0, codec.context_length // 2)


def _from(messages: Sequence[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """Return the messages from `start` on, and the system's messages before it."""
    said = [message for message in messages[:start] if message["role"] == "system"]
    return [*said, *messages[start:]]


def _rendered(
    messages: Sequence[dict[str, Any]],
    job: GenerateJob,
    codec: TextCodec,
    max_tokens: int | None = None,
) -> list[int]:
    try:
        chat = render_chat(
            codec,
            messages,
            job.tools,
            options=job.template_options,
            generation_prompt=job.generation_prompt,
        )
        if max_tokens is None or codec.min_num_tokens(chat.text) > max_tokens:
            _refuse_hopeless(chat.text, codec, "messages")
        return codec.encode_chat(chat)
    except PromptError as error:
        raise Refused(ErrorCode.INVALID_PROMPT, str(error), "messages") from error


def prefix_token_ids(system_prompt: str, codec: TextCodec) -> list[int]:
    """Return the tokens with which all chats begin that have this system prompt, and no tools.

    They end where the user's words begin: a token that those words could change is left out.
    Raises Refused.
    """
    system = {"role": "system", "content": system_prompt}
    chats = []
    for words in _FIRST_WORDS:
        job = GenerateJob(
            request_id="",
            tenant_id="",
            api_key_id="",
            gateway_id="",
            model="",
            base_model="",
            messages=(system, {"role": "user", "content": words}),
        )
        chats.append(chat_token_ids(job, codec))
    same = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*chats, strict=False))
    return [token_id for token_id, *_ in same]


def _refuse_hopeless(text: str, codec: TextCodec, param: str) -> None:
    """Raise Refused for a text that is certainly too long, without tokenizing it."""
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


def to_requests(
    job: GenerateJob,
    lease: int,
    prompts: Sequence[Prompt],
    codec: TextCodec,
    adapters: tuple[AdapterPart, ...] = (),
) -> list[Request]:
    """Make the engine's requests; an answer ends where the context does."""
    grammar = answer_grammar(job, prompts[0].token_ids, codec)
    bound: dict[str, Any] = {} if grammar is None else {grammar.kind.value: grammar.text}
    _check_scored(job, prompts)
    return [
        Request(
            request_id=engine_id,
            tenant_id=job.tenant_id,
            token_ids=prompt.token_ids,
            sampling=_sampling(job, codec.context_length - len(prompt.token_ids)),
            n=job.n,
            adapters=adapters,
            **bound,
            deadline=job.deadline,
            priority=Priority.BATCH if job.is_batch else Priority.INTERACTIVE,
            speculation=job.sampling.speculation,
        )
        for engine_id, prompt in zip(engine_ids(job, lease), prompts, strict=True)
    ]


def scored_top(job: GenerateJob) -> int | None:
    """Return how many alternatives to send for each token of the prompt; None: no scores."""
    sampling = job.sampling
    wanted = (sampling.prompt_logprobs, sampling.logprobs if job.echo else None)
    return max((number for number in wanted if number is not None), default=None)


def _check_scored(job: GenerateJob, prompts: Sequence[Prompt]) -> None:
    """Raise Refused if the prompts have more log-probabilities than may be sent."""
    most = scored_top(job)
    if most is None:
        return
    number = sum(len(prompt.token_ids) for prompt in prompts) * (1 + most) * job.n
    if number > MAX_PROMPT_LOGPROBS:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"The prompts have {number:,} log-probabilities to send; one request may have "
            f"{MAX_PROMPT_LOGPROBS:,}. Ask for fewer alternatives, or send fewer prompts.",
            "logprobs" if job.echo and job.sampling.logprobs is not None else "prompt_logprobs",
        )


def _sampling(job: GenerateJob, room: int) -> SamplingParams:
    """Make the engine's sampling parameters; room: tokens that the context has left."""
    sampling = job.sampling
    return SamplingParams(
        **{name: getattr(sampling, name) for name in _AS_THEY_ARE},
        max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        logit_bias=_logit_bias(sampling.logit_bias),
        prompt_logprobs=scored_top(job),
    )


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except ValueError as error:
        raise Refused(
            ErrorCode.INVALID_REQUEST, "The keys of logit_bias are token ids.", "logit_bias"
        ) from error
