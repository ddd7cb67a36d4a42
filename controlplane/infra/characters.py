"""Characters that JSON can spell and a database cannot keep."""

from __future__ import annotations

import json
from typing import Any


def can_be_written(value: Any) -> bool:
    """Return whether a JSON value has no lone surrogate, which UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
