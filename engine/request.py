"""Request and RequestOutput: what the engine takes and returns. No torch here."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from contract.messages.pooling import Pooling as Pooling
from contract.messages.protocol import FinishReason as FinishReason
from contract.messages.sampling import BIAS, MAX_ADAPTERS, RANGES
from contract.ranges import Range
from engine.errors import EngineError, InvalidPrompt, RequestError
from engine.grammar_text import Grammar, GrammarKind

#: What an engine with FP8 adapters is told behind a digest for it to keep that adapter as its files
#: have it, in bf16; the two are as different as two adapters.
ORIGINAL = ":original"
_SEQUENCES = Range(1, 64, is_whole=True)
MAX_GRAMMAR_CHARS = 512 * 1024
_MAX_FP32 = (2 - 2**-23) * 2.0**127


def digests_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the digests that an engine's names of adapters begin with, each once, in order."""
    return tuple(dict.fromkeys(name.removesuffix(ORIGINAL) for name in names))


class Priority(enum.StrEnum):
    """The class of a request; batch work gets the room that interactive requests leave."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters; `contract.messages.sampling` has the ranges, and what 0 and None mean.

    top_k               applied before top_p, top_p before min_p
    seed                the same seed gives the same tokens whatever else is in the batch, unless
                        two tokens are as close as rounding (docs/scheduling.md, "Seeds")
    repetition_penalty  over prompt and generated tokens; the other two over generated tokens
    logit_bias          token id -> number added to its logit
    logprobs            None: off; k: of the chosen token and of the k most likely ones
    prompt_logprobs     None: off; k: the same for every token of the prompt but the first
    min_tokens          no EOS or stop token before this many tokens
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def check(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field that is out of range."""
        for name, allowed in RANGES.items():
            _check(name, getattr(self, name), allowed)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise RequestError(
                    f"{name} must be at most {vocab_size}, the vocabulary's tokens", param=name
                )
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias is not a mapping", param="logit_bias")
        tokens = Range(0, vocab_size - 1, is_whole=True)
        for token_id, bias in self.logit_bias.items():
            _check("logit_bias", token_id, tokens, "a token of ")
            _check("logit_bias", bias, BIAS, "a number of ")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise RequestError("stop_token_ids is not a tuple of ids", param="stop_token_ids")
        for token_id in self.stop_token_ids:
            _check("stop_token_ids", token_id, tokens, "a token of ")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """One adapter of a blend; `weight` multiplies the adapter's own scaling."""

    digest: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorParams:
    """The vector that a request wants of its prompt: its pooled hidden state, of length one.

    pooling     None: as the adapter says, or else the model
    dimensions  how many first numbers of it, again of length one; None: all
    classifies  the probabilities of the adapter's labels instead
    """

    pooling: Pooling | None = None
    dimensions: int | None = None
    classifies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue.

    n            number of continuations; they share the prompt's pages. Each has its own outputs
                 under its index, and number i uses the seed + i
    adapters     () for the base model; several are applied as the exact weighted sum
    json_schema, regex, lark  the generated text obeys the schema, matches the whole expression, or
                 follows the grammar (in llguidance's Lark); at most one of them
    deadline     by the engine's clock (time.time by default); after it the request ends with
                 DeadlineExceeded, and before it with DeadlineUnreachable if it cannot be met
    speculation  whether tokens may be drafted for it, if the engine does so
    remember     whether its answer is remembered for drafts of the tenant's later requests with the
                 same adapters, and those before it are used; of no use without an adapter
    vector       given, the prompt's vector is the answer, and nothing is generated: max_tokens is 0
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    adapters: tuple[AdapterPart, ...] = ()
    tenant_id: str = ""
    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None
    deadline: float | None = None
    priority: Priority = Priority.INTERACTIVE
    speculation: bool = True
    remember: bool = False
    vector: VectorParams | None = None

    def check(self, vocab_size: int) -> None:
        """Raise InvalidPrompt or RequestError naming the first field that is wrong."""
        self._check_prompt(vocab_size)
        self.sampling.check(vocab_size)
        _check("n", self.n, _SEQUENCES)
        if not isinstance(self.tenant_id, str):
            raise RequestError(f"tenant_id is {self.tenant_id!r}, not text", param="tenant_id")
        if not isinstance(self.speculation, bool):
            raise RequestError(
                f"speculation is {self.speculation!r}, not true or false", param="speculation"
            )
        if not isinstance(self.remember, bool):
            raise RequestError(
                f"remember is {self.remember!r}, not true or false", param="remember"
            )
        if self.priority not in tuple(Priority):
            raise RequestError(f"priority is {self.priority!r}, not a Priority", param="priority")
        # NaN is not equal to itself.
        is_number = isinstance(self.deadline, Real) and self.deadline == self.deadline
        if self.deadline is not None and not is_number:
            raise RequestError(f"deadline is {self.deadline!r}, not a number", param="deadline")
        self._check_adapters()
        self._check_grammar()
        self._check_vector()

    def _check_vector(self) -> None:
        sampling = self.sampling
        asks_for_more = self.n != 1 or sampling.max_tokens != 0 or self.speculation
        if self.vector is not None and (asks_for_more or sampling.prompt_logprobs is not None):
            message = "a request for a vector has n 1, max_tokens 0, no speculation and no scores"
            raise RequestError(message, param="vector")

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the generated text must obey; None: there is none."""
        for kind in GrammarKind:
            text = getattr(self, kind.value)
            if text is not None:
                return Grammar(kind, text)
        return None

    def _check_grammar(self) -> None:
        given = [kind.value for kind in GrammarKind if getattr(self, kind.value) is not None]
        if len(given) > 1:
            raise RequestError(f"{given[1]} cannot be combined with {given[0]}", param=given[1])
        for name in given:
            text = getattr(self, name)
            if not isinstance(text, str):
                raise RequestError(f"{name} is not text", param=name)
            if len(text) > MAX_GRAMMAR_CHARS:
                raise RequestError(
                    f"{name} has {len(text)} characters; {MAX_GRAMMAR_CHARS} is the limit",
                    param=name,
                )

    def _check_prompt(self, vocab_size: int) -> None:
        try:
            token_ids = array("q", self.token_ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidPrompt(
                f"the prompt is not token ids: {error}", param="token_ids"
            ) from error
        if not token_ids:
            raise InvalidPrompt("the prompt has no tokens", param="token_ids")
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            place = next(i for i, each in enumerate(token_ids) if not 0 <= each < vocab_size)
            others = f" (its ids are {min(token_ids)} to {max(token_ids)})" if place else ""
            raise InvalidPrompt(
                f"token ids must be 0 to {vocab_size - 1}: the prompt has {token_ids[place]} at "
                f"index {place}{others}",
                param="token_ids",
            )

    def _check_adapters(self) -> None:
        if len(self.adapters) > MAX_ADAPTERS:
            raise RequestError(
                f"a request may name {MAX_ADAPTERS} adapters at most, not {len(self.adapters)}",
                param="adapters",
            )
        if len({part.digest for part in self.adapters}) != len(self.adapters):
            raise RequestError("an adapter is named twice", param="adapters")
        for part in self.adapters:
            if not is_finite(part.weight):
                raise RequestError(
                    f"the weight of adapter {part.digest[:12]} is not finite", param="adapters"
                )


class TokenLogprob(NamedTuple):
    """One generated token, or one of a prompt, and the best alternatives, most likely first.

    rank  only for a prompt's token: 1 for the most likely

    Log-probabilities are of the model's own distribution, before temperature, penalties, bias and
    grammar.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The result of one step for one continuation of a request.

    index             which of the request's n continuations; each ends exactly once
    token_ids         new since the last output, without the EOS or stop token that ends a request
    num_prompt_tokens, num_cached_tokens  of the prompt: the same under every index, billed once
    num_generated     tokens generated so far under this index, the ending one included: what is
                      billed
    end_logprob       of the token that ended the request, which is not in token_ids
    prompt_logprobs   of the prompt's tokens from the second on, if asked for: under one index, with
                      its first token
    vector            in the last output of a request for a vector
    adapter_bytes     in the last output: what the request's adapters take of the arena
    adapter_load_s    in the last output: seconds of their last loads, from files to the arena
    finish_reason     set in the index's last output, which comes exactly once
    error             set when the reason is ERROR
    accepted_drafts   drafted tokens so far that were right, so that no step was needed for them, by
                      source; final in the last output, as is
    num_rejected_drafts  those that were wrong or not needed
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    end_logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    vector: list[float] | None = None
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated: int = 0
    adapter_bytes: int = 0
    adapter_load_s: float = field(default=0.0, compare=False)
    accepted_drafts: Mapping[str, int] = field(default_factory=dict)
    num_rejected_drafts: int = 0

    @property
    def num_accepted_drafts(self) -> int:
        """Drafted tokens so far that were right, of all sources."""
        return sum(self.accepted_drafts.values())


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """A prompt's beginning whose KV is to stay in the arena: see `Engine.keep_prefixes`.

    name  identifies it; the same name means the same tenant, adapters and tokens
    """

    name: str
    tenant_id: str
    adapters: tuple[AdapterPart, ...]
    token_ids: tuple[int, ...]


def is_finite(value: Any) -> bool:
    """Return whether `value` is a finite number within the range of fp32."""
    is_number = isinstance(value, Real)
    return is_number and bool(-_MAX_FP32 <= value <= _MAX_FP32)  # false for NaN


def _check(name: str, value: Any, allowed: Range, part_of: str = "") -> None:
    if not allowed.has(value):
        raise RequestError(f"{part_of}{name} must be {allowed}", param=name)
