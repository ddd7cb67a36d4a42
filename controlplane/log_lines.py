"""What log lines must not say."""

from __future__ import annotations

import logging
import re

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
        told = _ADDRESS.sub(r"\1…", said)
        told = _API_KEY.sub(r"\1…", _PARAMETER.sub(r"\1…", told))
        if told != said:
            record.msg, record.args = told, None
        return True
