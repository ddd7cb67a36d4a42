"""Remove secrets from log lines."""

from __future__ import annotations

import logging
import re
from urllib.parse import unquote

#: Addresses that contain a secret token; Django and uvicorn write them to the log.
_ADDRESS = re.compile(
    r"(/console/(?:invites|account/password/reset/key|account/confirm-email)/)[^\s/?\"']+"
)
#: A key in a query string. Nothing reads it there, but some clients send it: ?api_key=…, ?token=…
_PARAMETER = re.compile(
    r"([?&;][^\s=&;\"']{0,40}(?:key|token|secret|authorization|password|signature)=)[^\s&;\"']+",
    re.IGNORECASE,
)
#: An API key itself; its underscores may be URL-encoded.
_API_KEY = re.compile(r"\b(lk(?:_|%5F)(?:live|test)(?:_|%5F))[A-Za-z0-9_%]+", re.IGNORECASE)


class SecretFilter(logging.Filter):
    """Masks API keys and the tokens of invites, password resets and e-mail confirmations."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        safe = _masked(message)
        if "%" in safe:
            # A key may be URL-encoded, even several times.
            plain = unquote(unquote(unquote(safe)))
            if (masked := _masked(plain)) != plain:
                safe = "".join(c if c.isprintable() else "…" for c in masked)
        if safe != message:
            record.msg, record.args = safe, None
        if record.name == "django.security.DisallowedHost":
            record.exc_info = None  # a traceback of 2.5 KB with the raw header
        return True


def _masked(text: str) -> str:
    text = _ADDRESS.sub(r"\1…", text)
    return _API_KEY.sub(r"\1…", _PARAMETER.sub(r"\1…", text))
