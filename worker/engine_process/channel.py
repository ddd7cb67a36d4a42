"""What the worker's two processes say to each other: one list per step and direction.

    IO process  -> engine process   [Add | Cancel | Register | Unregister, …]
    engine process -> IO process    StepReport

Plain values only, no engine types: the IO process never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Start a request. `sampling` has the fields of the engine's SamplingParams."""

    request_id: str
    tenant_id: str
    token_ids: list[int]
    sampling: dict[str, object]
    n: int = 1
    adapters: tuple[tuple[str, float], ...] = ()  # digest, weight
    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None
    deadline: float | None = None
    is_batch: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request early, or one choice of it; its last outputs come with `reason`."""

    request_id: str
    reason: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Register:
    """Make an adapter known: `folder` holds its two files until it is unregistered."""

    digest: str
    folder: str


@dataclass(frozen=True, slots=True)
class Unregister:
    digest: str


Command = Add | Cancel | Register | Unregister


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine error as plain values; `code` is an ErrorCode."""

    code: str
    message: str
    param: str | None = None


#: token id, log-probability, [(token id, log-probability) of the best …]
Logprob = tuple[int, float, tuple[tuple[int, float], ...]]


#: The same of a prompt's token, and its rank: 1 for the likeliest
PromptLogprob = tuple[int, float, tuple[tuple[int, float], ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one step added to one request; the engine's RequestOutput without its types."""

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    end_logprob: Logprob | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How the engine stands, for the heartbeat."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    free_pages: int = 0
    num_pages: int = 0
    resident_digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one step; the first one says that the engine is loaded.

    stats  None: as in the last report that had them; they are long when many adapters are resident
    """

    outputs: list[Output] = field(default_factory=list)
    stats: Stats | None = None
