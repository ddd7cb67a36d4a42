"""The formats of JSON Schema: as patterns of whole strings for the decoder, and as checks.

A pattern may be narrower than its check: an answer needs no leap second.
"""

from __future__ import annotations

import re
from typing import Final

from contract.schemas.ecma_regex import BadPattern, parse

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

#: Formats that are narrower than the decoder's own: no calendar has a 30th of February.
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

_DATE_TEXT = re.compile(_DATE)
_TIME_TEXT = re.compile(
    r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9]|60)(?:\.[0-9]+)?"
    r"(?:[Zz]|([+-])([01][0-9]|2[0-3]):([0-5][0-9]))"
)
_POINTER_TEXT = re.compile(PATTERNS["json-pointer"], re.DOTALL)


def is_date(text: str) -> bool:
    """Return whether the text is a date of the calendar, as RFC 3339 writes it."""
    return _DATE_TEXT.fullmatch(text) is not None


def is_time(text: str) -> bool:
    """Return whether the text is a time of RFC 3339 with an offset, perhaps a leap second."""
    found = _TIME_TEXT.fullmatch(text)
    if found is None:
        return False
    offset = 0 if found[4] is None else int(f"{found[4]}1") * (int(found[5]) * 60 + int(found[6]))
    minute = (int(found[1]) * 60 + int(found[2]) - offset) % 1440
    return found[3] != "60" or minute == 1439


def is_date_time(text: str) -> bool:
    """Return whether the text is a date and time of RFC 3339."""
    return text[10:11] in ("T", "t") and is_date(text[:10]) and is_time(text[11:])


def is_json_pointer(text: str) -> bool:
    """Return whether the text is a pointer of RFC 6901."""
    return _POINTER_TEXT.fullmatch(text) is not None


def is_regex(text: str) -> bool:
    """Return whether the text is a regular expression of ECMA-262, supported here or not."""
    try:
        parse(text)
    except BadPattern as error:
        return not error.is_invalid
    return True


#: The checks of finished answers; the other formats are checked by `jsonschema`.
CHECKS: Final = {
    "date": is_date,
    "time": is_time,
    "date-time": is_date_time,
    "json-pointer": is_json_pointer,
    "regex": is_regex,
}
