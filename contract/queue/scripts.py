"""Load the queue's Lua scripts, one in each `.lua` file beside this one.

Three things in them are not Lua. The line `--#include NAME` stands for the file NAME.lua; `{NAME}`
stands for the constant NAME of `contract.messages.protocol`, `fair_queue` or `reply_streams`, and
`{name_key(pool, id)}` for the key that their function `name_key` makes of Lua's `pool` and `id`.

All changes to a request go through a script that compares the lease first: a worker that was paused
and replaced can no longer publish, acknowledge or bill. Each script may be repeated after a lost
reply without a second effect.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from contract.messages import protocol
from contract.queue import fair_queue, reply_streams

_FOLDER = Path(__file__).parent
_NAMES = {**vars(protocol), **vars(fair_queue), **vars(reply_streams)}


@functools.cache
def load(name: str) -> str:
    """Return the script in NAME.lua, with its includes, constants and keys filled in."""
    source = (_FOLDER / f"{name}.lua").read_text("utf-8")
    source = re.sub(r"(?m)^--#include (\w+)\n", lambda match: load(match[1]), source)
    source = re.sub(r"\{(\w+_key)\(([\w, ]+)\)\}", _key, source)
    return re.sub(r"\{([A-Z_]+)\}", lambda match: str(_NAMES[match[1]]), source)


def _key(call: re.Match[str]) -> str:
    key = _NAMES[call[1]](*(f"' .. {name} .. '" for name in call[2].split(", ")))
    return f"'{key}'".removesuffix(" .. ''")
