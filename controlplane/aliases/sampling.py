"""The sampling defaults of an alias: names and ranges are those of the bodies of /v1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from controlplane.errors import InvalidRequest

PARAM = "sampling"
MAX_STOPS, MAX_STOP_CHARS = 4, 500
INT64 = 2**63 - 1


class _Range(NamedTuple):
    least: float
    most: float
    is_whole: bool = False
    is_open: bool = False  # the lower bound is excluded


RANGES = {
    "temperature": _Range(0, 2),
    "top_p": _Range(0, 1),
    "top_k": _Range(-1, 1_000_000, is_whole=True),
    "min_p": _Range(0, 1),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0, 10, is_open=True),
    "max_tokens": _Range(1, 10_000_000, is_whole=True),
    "seed": _Range(-INT64 - 1, INT64, is_whole=True),
}
FIELDS = (*RANGES, "stop")


def checked_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults in the order of `FIELDS`, without those that are None.

    Raises InvalidRequest that names the field.
    """
    for name in given:
        if name not in FIELDS:
            raise InvalidRequest(
                f"There is no default for {name[:100]}; there are: {', '.join(FIELDS)}.",
                param=f"{PARAM}.{name[:100]}",
            )
    found = {name: given[name] for name in FIELDS if given.get(name) is not None}
    for name, value in found.items():
        if name == "stop":
            found[name] = _stops(value)
        elif not _is_in(RANGES[name], value):
            raise InvalidRequest(_problem(name), param=f"{PARAM}.{name}")
    return found


def _is_in(allowed: _Range, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if allowed.is_whole else (int, float)):
        return False
    return allowed.least <= value <= allowed.most and not (
        allowed.is_open and value == allowed.least
    )


def _problem(name: str) -> str:
    allowed = RANGES[name]
    kind = "whole number" if allowed.is_whole else "number"
    least = f"over {allowed.least:g}" if allowed.is_open else f"from {allowed.least:g}"
    return f"{name} is a {kind} {least} to {allowed.most:g}."


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    is_list = isinstance(stops, list) and 1 <= len(stops) <= MAX_STOPS
    if not is_list or not all(map(_is_stop, stops)):
        raise InvalidRequest(
            f"stop is 1 to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters.",
            param=f"{PARAM}.stop",
        )
    return list(stops)


def _is_stop(stop: Any) -> bool:
    if not isinstance(stop, str) or "\0" in stop:
        return False
    return 1 <= len(stop) <= MAX_STOP_CHARS and stop.encode(errors="replace").decode() == stop
