"""What log lines must not say."""

from __future__ import annotations

import logging
import re

#: Addresses that open something to whoever has them: Django and uvicorn write them into the log.
_SECRET = re.compile(
    r"(/console/(?:invites|account/password/reset/key|account/confirm-email)/)[^\s/?\"']+"
)


class SecretFilter(logging.Filter):
    """Takes the tokens of invites, lost passwords and e-mail addresses out of a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        told = _SECRET.sub(r"\1…", said)
        if told != said:
            record.msg, record.args = told, None
        return True
