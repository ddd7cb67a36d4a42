"""What log lines must not say."""

from __future__ import annotations

import logging
import re
from urllib.parse import unquote

#: Addresses that open something to whoever has them: Django and uvicorn write them into the log.
_ADDRESS = re.compile(
    r"(/console/(?:invites|account/password/reset/key|account/confirm-email)/)[^\s/?\"']+"
)
#: A key in a query, where nothing reads it but clients put it: ?api_key=…, ?token=…
_PARAMETER = re.compile(
    r"([?&;][^\s=&;\"']{0,40}(?:key|token|secret|authorization|password|signature)=)[^\s&;\"']+",
    re.IGNORECASE,
)
#: An API key itself, its underscores perhaps as a URL has them.
_API_KEY = re.compile(r"\b(lk(?:_|%5F)(?:live|test)(?:_|%5F))[A-Za-z0-9_%]+", re.IGNORECASE)


class SecretFilter(logging.Filter):
    """Takes API keys and the tokens of invites, lost passwords and e-mail addresses out of a
    record."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        told = _masked(said)
        if "%" in told:
            # A key whose letters are encoded, once or again, is a key still.
            plain = unquote(unquote(unquote(told)))
            if (masked := _masked(plain)) != plain:
                told = "".join(c if c.isprintable() else "…" for c in masked)
        if told != said:
            record.msg, record.args = told, None
        if record.name == "django.security.DisallowedHost":
            record.exc_info = None  # a stranger's 2.5 KB, with the header as it came
        return True


def _masked(text: str) -> str:
    text = _ADDRESS.sub(r"\1…", text)
    return _API_KEY.sub(r"\1…", _PARAMETER.sub(r"\1…", text))
