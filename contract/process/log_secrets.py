"""Remove secrets and control characters from log lines. Standard library only.

This is the second wall: nobody logs a secret on purpose, but clients put keys into addresses, and
libraries put addresses and passwords into their errors.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote

#: Longest text in a line; the rest is cut.
MAX_CHARS = 4000
#: Largest number of items of a list or dictionary in a line.
_MAX_ITEMS = 100

#: Fields whose values are secrets or people's texts; our own code never logs them.
NEVER_LOGGED = frozenset(
    (
        "password",
        "secret",
        "token",
        "authorization",
        "cookie",
        "api_key",
        "signature",
        "prompt",
        "messages",
        "answer",
        "content",
        "text",
        "body",
    )
)

#: Addresses that contain a secret token: Django and uvicorn write them to the log.
_ADDRESS = re.compile(
    r"(/console/(?:invites|account/password/reset/key|account/confirm-email)/)[^\s/?\\\"'<]+"
)
#: A key in a query string. Nothing reads it there, but some clients send it: ?api_key=…, ?token=…
#: Presigned addresses have X-Amz-Signature=… and X-Amz-Credential=…
_PARAMETER = re.compile(
    r"([?&;][^\s=&;\"']{0,40}(?:key|token|secret|authorization|password|signature|credential)=)"
    r"[^\s&;\\\"']+",
    re.IGNORECASE,
)
#: An API key itself, of a tenant or an operator; its underscores may be URL-encoded.
_API_KEY = re.compile(
    r"\b(lk[a-z]{0,4}(?:_|%5F)[a-z]{2,8}(?:_|%5F))[A-Za-z0-9_%]{6,}", re.IGNORECASE
)
#: The credentials of a header, the password in a URL, a token of the Hugging Face Hub.
_CREDENTIALS = re.compile(
    r"\b((?:Bearer|Basic)\s+)(?=\S*[0-9=])[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"(://[^\s/:@\"']*:)[^\s/@\"']+(?=@)")
_HUB_TOKEN = re.compile(r"\b(hf_)[A-Za-z0-9]{16,}")
#: Parts of messages in which PostgreSQL and pydantic quote the data that they refuse.
_ROW = re.compile(r"((?:Failing row contains|Key \([^)]*\)=) ?\().*", re.DOTALL)
_INPUT = re.compile(r"(\binput_value=).*")
_SHAPES = (
    *(_ADDRESS, _PARAMETER, _API_KEY, _CREDENTIALS, _URL_PASSWORD, _HUB_TOKEN),
    *(_ROW, _INPUT),
)
#: Fast test: a text without any of these contains no secret, so the slower patterns are skipped.
_SUSPECT = re.compile(r"[%=@]|lk|/console/|bearer|basic|hf_|row contains", re.IGNORECASE)

#: Control characters: they could move a terminal's cursor, or fake a new line of the log.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_LINE_BREAK = re.compile(r"[\t\n]")


def masked(text: str) -> str:
    """Return the text with "…" for keys, passwords, signatures and tokens."""
    if _SUSPECT.search(text) is None:
        return text
    safe = _mask(text)
    if "%" in safe:
        # A key may be URL-encoded, even several times.
        plain = unquote(unquote(unquote(safe)))
        if (again := _mask(plain)) != plain:
            return again
    return safe


def visible(text: str) -> str:
    """Return the text with control characters written out; line breaks and tabs stay."""
    return text if text.isprintable() else _CONTROL.sub(_escape, text)


def mask_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask, bound and clean all texts of a log line. A processor of structlog.

    What JSON does not have becomes its representation.
    """
    for name, value in event.items():
        event[name] = "…" if name in NEVER_LOGGED else _safe(value)
    if not (said := event.get("event", "")).isprintable():
        event["event"] = _LINE_BREAK.sub(_escape, said)
    return event


def _safe(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return visible(masked(value if len(value) <= MAX_CHARS else f"{value[:MAX_CHARS]}…"))
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth < 8 and isinstance(value, dict):
        return {
            str(name): "…" if name in NEVER_LOGGED else _safe(inner, depth + 1)
            for name, inner in list(value.items())[:_MAX_ITEMS]
        }
    if depth < 8 and isinstance(value, list | tuple):
        return [_safe(inner, depth + 1) for inner in value[:_MAX_ITEMS]]
    return _safe(str(value) if depth < 8 else "…")


def _mask(text: str) -> str:
    for shape in _SHAPES:
        text = shape.sub(r"\1…", text)
    return text


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
