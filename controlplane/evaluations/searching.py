"""Search tenants' patterns in answers. Python's engine may take exponential time, so it is run in a
sealed child with a limit of CPU time; a search that takes longer counts as not found."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from contract.process.sealed_process import MAX_WORK_BYTES
from contract.schemas import pattern_search_process
from controlplane.infra import sealed_child
from controlplane.infra.sealed_child import Bounds, run_sealed

log = logging.getLogger(__name__)

_MODULE = pattern_search_process.__name__
_BOUNDS = Bounds(memory_bytes=64 << 20, cpu_s=1, wall_s=20.0, answer_bytes=64 << 10)
#: Largest number of children for all searches; the remaining ones count as not found.
_MAX_CHILDREN = 12
#: Number of times a child that was killed from outside is started again.
_TRIES = 3

Search = tuple[str, str]


def searched(wanted: Sequence[Search]) -> dict[Search, bool]:
    """Return whether each pattern is found in its text; at most `_MAX_CHILDREN` are started."""
    answers = dict.fromkeys(wanted, False)
    todo = [list(answers)] if answers else []
    for _ in range(_MAX_CHILDREN):
        if not todo:
            break
        asked = todo.pop()
        found = _found(asked)
        if found is not None:
            answers.update(zip(asked, found, strict=True))
        elif len(asked) > 1:
            middle = len(asked) // 2
            todo = [asked[:middle], asked[middle:], *todo]
    return answers


def _found(asked: Sequence[Search]) -> list[bool] | None:
    """Return the child's answer; None when it took too long."""
    work = {"searches": asked}
    if len(json.dumps(work)) > MAX_WORK_BYTES:
        return None
    for attempt in range(_TRIES):
        try:
            ended = run_sealed(_MODULE, work, (), environment={}, bounds=_BOUNDS)
        except (sealed_child.OverBounds, sealed_child.Broken) as error:
            log.info("a search for patterns was stopped: %s", error)
            return None
        except sealed_child.Lost:
            if attempt == _TRIES - 1:
                raise
            continue
        found = ended.answer.get("found")
        if isinstance(found, list) and len(found) == len(asked):
            return [each is True for each in found]
        return None
    return None
