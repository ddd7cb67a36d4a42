"""Values at the two ends of a `contract.ranges.Range`, and just outside."""

from __future__ import annotations

from typing import Any

from contract.ranges import Range


def inside(allowed: Range) -> list[Any]:
    step = 1 if allowed.is_whole else 1e-6
    return [allowed.least + step * allowed.is_open, allowed.most]


def outside(allowed: Range) -> list[Any]:
    step = 1 if allowed.is_whole else 1e-6
    return [allowed.least - step * (not allowed.is_open), allowed.most + step]
