"""The origins of pages that may call the gateway from a browser: a tenant's list."""

from __future__ import annotations

import re
from collections.abc import Sequence

from controlplane.errors import InvalidRequest

MAX_ORIGINS = 20
MAX_ORIGIN_CHARS = 200
_LABEL = r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?"
_ORIGIN = re.compile(
    rf"https?://(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:]{{2,39}}\])(?::[1-9][0-9]{{0,4}})?"
)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def checked_origins(origins: Sequence[str]) -> list[str]:
    """Return the list to store: each origin once, as browsers write it. Raises InvalidRequest."""
    found = dict.fromkeys(_checked(origin) for origin in origins[: MAX_ORIGINS + 1])
    if len(origins) > MAX_ORIGINS:
        raise InvalidRequest(
            f"There can be at most {MAX_ORIGINS} origins.", param="allowed_origins"
        )
    return list(found)


def _checked(origin: str) -> str:
    plain = origin.strip().lower()
    if len(plain) > MAX_ORIGIN_CHARS or not _ORIGIN.fullmatch(plain):
        raise InvalidRequest(
            f"`{origin[:100]}` is not an origin: write only scheme, host and port, as in "
            "https://app.example.com or http://localhost:3000.",
            param="allowed_origins",
        )
    return plain.removesuffix(_DEFAULT_PORTS[plain.partition(":")[0]])
