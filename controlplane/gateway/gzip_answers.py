"""Compress answers for clients that accept gzip: only JSON, and none to a session's cookie.

Streams are not compressed, since a compressor would hold tokens back. Pages are not either: if
a secret (a CSRF token) is compressed with text of an attacker, the length reveals the secret.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Any

from controlplane.gateway.body_limit import Event, Send

#: A shorter answer fits one packet either way.
MIN_BYTES = 1400
#: Most of the gain, at a third of the default's time.
_LEVEL = 4
_GZIP_FORMAT = 31


def takes_gzip(headers: dict[bytes, bytes]) -> bool:
    if b"cookie" in headers:
        return False
    for item in headers.get(b"accept-encoding", b"").lower().split(b","):
        name, _, quality = item.partition(b";")
        if name.strip() == b"gzip":
            return quality.replace(b" ", b"").rstrip(b".0") != b"q="
    return False


class Gzipping:
    """`send` for one request; called with its messages."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Event | None = None  # held until the length of the body is known
        self._compressor: Any = None

    async def __call__(self, message: Event) -> None:
        if message["type"] == "http.response.start" and _is_json(message):
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            start, self._start = self._start, None
            await self._first(start, message)
        elif message["type"] == "http.response.body" and self._compressor is not None:
            await self._send({**message, "body": self._compressed(message)})
        else:
            await self._send(message)

    async def _first(self, start: Event, message: Event) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        headers = [*start["headers"], (b"vary", b"Accept-Encoding")]
        if not more and len(body) < MIN_BYTES:
            await self._send({**start, "headers": headers})
            await self._send(message)
            return
        headers = [pair for pair in headers if pair[0].lower() != b"content-length"]
        headers.append((b"content-encoding", b"gzip"))
        if more:
            self._compressor = zlib.compressobj(_LEVEL, wbits=_GZIP_FORMAT)
            body = self._compressed(message)
        else:
            body = gzip.compress(body, _LEVEL, mtime=0)
            headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({**message, "body": body})

    def _compressed(self, message: Event) -> bytes:
        body: bytes = self._compressor.compress(message.get("body", b""))
        if not message.get("more_body", False):
            body += self._compressor.flush()
        return body


def _is_json(start: Event) -> bool:
    kind = b""
    for name, value in start["headers"]:
        if name.lower() == b"content-encoding":
            return False
        if name.lower() == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
    return kind == b"application/json" or kind.endswith(b"+json")
