"""The messages between the worker's two processes: one list per step and direction.

    IO process  -> engine process   [Command, …]
    engine process -> IO process    StepReport

They use the engine's types from modules without torch, which the IO process never imports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import FinishReason, KeptPrefix, Request, RequestOutput
from engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request early, or one of its choices; its last output has `reason`."""

    request_id: str
    reason: FinishReason
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Register:
    """Register an adapter: `folder` keeps its two files until it is unregistered."""

    digest: str
    folder: str


@dataclass(frozen=True, slots=True)
class Unregister:
    digest: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Load a registered adapter before a request needs it: into host memory, or the arena too."""

    digest: str
    to_arena: bool


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep these adapters in the arena, as (tenant, digest), and no others."""

    wanted: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class KeepPrefixes:
    """Keep the KV of these prefixes, and of no others."""

    wanted: tuple[KeptPrefix, ...]


Command = Request | Cancel | Register | Unregister | Prefetch | Pin | KeepPrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one step; the first report means that the engine is loaded.

    stats  None: unchanged since the last report with stats, which are long with many adapters
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    stats: EngineStats | None = None
