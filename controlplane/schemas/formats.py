"""Formats as patterns of whole strings."""

from __future__ import annotations

from typing import Final

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_4}|{_BY_4}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?{_OFFSET}"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_MAILBOX = r"[A-Za-z0-9_%+-]{1,31}(?:\.[A-Za-z0-9_%+-]{1,31}){0,1}"

#: Formats that are narrower than the decoder's own: a calendar has no 30th of February.
PATTERNS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_MAILBOX}@(?:{_LABEL}\.){{1,4}}[A-Za-z]{{2,24}}",
    "json-pointer": "(?:/(?:[^~/]|~[01])*)*",
}
#: Formats that the decoder supports itself.
NATIVE: Final = frozenset({"duration", "hostname", "ipv4", "ipv6", "uri", "uuid"})
#: Formats that only the check of the finished answer supports.
CHECKED: Final = frozenset({"regex"})
