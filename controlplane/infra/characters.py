"""Characters that JSON can spell and a database cannot keep."""

from __future__ import annotations

import json
from typing import Any


def can_be_written(value: Any) -> bool:
    """Whether a value that was JSON has no half of a surrogate pair, which UTF-8 does not write."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
