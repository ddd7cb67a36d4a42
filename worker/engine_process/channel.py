"""What the worker's two processes say to each other: one list per step and direction.

    IO process  -> engine process   [Request | Cancel | Register | Unregister, …]
    engine process -> IO process    StepReport

The engine's own types, of the modules that do without torch: the IO process never imports it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import FinishReason, Request, RequestOutput
from engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request early, or one choice of it; its last outputs come with `reason`."""

    request_id: str
    reason: FinishReason
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Register:
    """Make an adapter known: `folder` holds its two files until it is unregistered."""

    digest: str
    folder: str


@dataclass(frozen=True, slots=True)
class Unregister:
    digest: str


Command = Request | Cancel | Register | Unregister


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one step; the first one says that the engine is loaded.

    stats  None: as in the last report that had them; they are long when many adapters are resident
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    stats: EngineStats | None = None
