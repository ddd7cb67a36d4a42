"""The settings in an adapter's `gate`: suite, drops that matter, consequence of a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from controlplane.errors import InvalidRequest
from controlplane.evaluations.decision import Policy
from controlplane.evaluations.habits import Limits
from controlplane.evaluations.services import MAX_TOKENS
from controlplane.evaluations.suites import suite_get

ON_PASS = ("promote", "canary", "hold")
#: Field -> its allowed range.
_RANGES: dict[str, tuple[float, float]] = {
    "score_drop": (0.001, 1.0),
    "logprob_drop": (0.001, 10.0),
    "slice_drop": (0.001, 1.0),
    "alpha": (0.0001, 0.2),
    "power": (0.5, 0.99),
    "max_leaked": (0.0, 1.0),
}
_HABITS: dict[str, tuple[float, float]] = {
    "max_length_ratio": (1.0, 1000.0),
    "max_repeated_rise": (0.0, 1.0),
    "max_refusals_rise": (0.0, 1.0),
    "max_invalid_rise": (0.0, 1.0),
}
_NUMBERS = {"max_tokens": (1, MAX_TOKENS), "canary_percent": (1, 100)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatePolicy:
    """The checked `gate` of an adapter.

    suite           the name of the suite; its newest version counts
    on_pass         promote; canary: begin a canary of the adapter's default alias; hold: a person
                    decides
    canary_percent  of the callers, whom the canary answers
    max_tokens      of each answer
    """

    suite: str = ""
    on_pass: str = "promote"
    canary_percent: int = 10
    max_tokens: int = 256
    decision: Policy = dataclasses.field(default_factory=Policy)
    habits: Limits = dataclasses.field(default_factory=Limits)

    def as_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("suite", "on_pass", *_NUMBERS)}
        return own | dataclasses.asdict(self.decision) | dataclasses.asdict(self.habits)


def gate_policy(fields: Mapping[str, Any]) -> GatePolicy:
    """Return the policy of an adapter's `gate`, with defaults for missing fields.

    Raises InvalidRequest that names the field, NotFound for the suite.
    """
    for name in fields:
        if name not in ("suite", "on_pass", *_NUMBERS, *_RANGES, *_HABITS):
            raise InvalidRequest(
                "There is no such field: remove it.", param=f"gate.{str(name)[:60]}"
            )
    on_pass = fields.get("on_pass", "promote")
    if on_pass not in ON_PASS:
        raise InvalidRequest(f"This must be one of {', '.join(ON_PASS)}.", param="gate.on_pass")
    suite = fields.get("suite", "")
    if suite is None:
        suite = ""
    if not isinstance(suite, str):
        raise InvalidRequest("This must be the name of a suite.", param="gate.suite")
    if suite:
        suite_get(name=suite, param="gate.suite")
    bounds = _NUMBERS | _RANGES | _HABITS
    for name, (low, high) in bounds.items():
        value = fields.get(name, low)
        is_number = type(value) is int or (type(value) is float and name not in _NUMBERS)
        if not is_number or not low <= value <= high:
            raise InvalidRequest(f"It is from {low} to {high}.", param=f"gate.{name}")
    numbers = {name: fields[name] for name in _NUMBERS if name in fields}
    matters = {name: float(fields[name]) for name in _RANGES if name in fields}
    limits = {name: float(fields[name]) for name in _HABITS if name in fields}
    return GatePolicy(
        suite=suite,
        on_pass=on_pass,
        decision=Policy(**matters),
        habits=Limits(**limits),
        **numbers,
    )
