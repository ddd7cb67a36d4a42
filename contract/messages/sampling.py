"""The sampling parameters of a request: their names, types, defaults and ranges.

Bodies of /v1, the defaults of aliases and the engine's check read the ranges here.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from contract.messages.message import Message
from contract.ranges import Range, ranges_of

MAX_STOPS = 4
MAX_STOP_CHARS = 500
MAX_LOGPROBS = 20
#: Number of adapters in a blend, and the range of each one's weight.
MAX_ADAPTERS, WEIGHT = 8, Range(-100, 100)
#: Range of each number in `logit_bias`.
BIAS = Range(-100, 100)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Message):
    """Sampling parameters of a request, with OpenAI's names and ranges."""

    # None: to the end of the context; 0: only the prompt is computed
    max_tokens: Annotated[int | None, Range(0, 10_000_000)] = None
    temperature: Annotated[float, Range(0, 2)] = 1.0  # 0: greedy
    top_p: Annotated[float, Range(0, 1)] = 1.0  # 0: only the likeliest token
    top_k: Annotated[int, Range(-1, 1_000_000)] = 0  # 0, and -1 as vLLM writes it: off
    min_p: Annotated[float, Range(0, 1)] = 0.0
    seed: Annotated[int | None, Range(-(2**63), 2**63 - 1)] = None
    stop: tuple[str, ...] = ()
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Range(0, 10, is_open=True)] = 1.0
    # the answer cannot end before this number of tokens
    min_tokens: Annotated[int, Range(0, 10_000_000)] = 0
    logit_bias: dict[str, float] = dataclasses.field(default_factory=dict)  # token id -> bias
    # None: off; k: the chosen token's and the k best tokens'
    logprobs: Annotated[int | None, Range(0, MAX_LOGPROBS)] = None
    # the same of each token of the prompt but the first
    prompt_logprobs: Annotated[int | None, Range(0, MAX_LOGPROBS)] = None
    ignore_eos: bool = False
    speculation: bool = True  # False: the worker must not draft tokens for it


RANGES = ranges_of(Sampling)
#: Range of `max_tokens` of an answer; only a plain completion may score its prompt alone.
ANSWER_TOKENS = dataclasses.replace(RANGES["max_tokens"], least=1)
