"""The sampling defaults of an alias: names and ranges are those of the bodies of /v1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.messages.sampling import ANSWER_TOKENS, MAX_STOP_CHARS, MAX_STOPS, RANGES
from controlplane.errors import InvalidRequest

PARAM = "sampling"
_RANGES = {
    name: allowed
    for name, allowed in (RANGES | {"max_tokens": ANSWER_TOKENS}).items()
    if name not in ("min_tokens", "logprobs", "prompt_logprobs")
}
FIELDS = (*_RANGES, "stop")


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
        elif not _RANGES[name].has(value):
            raise InvalidRequest(f"{name} is {_RANGES[name]}.", param=f"{PARAM}.{name}")
    return found


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
