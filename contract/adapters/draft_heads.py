"""The names of an adapter's draft heads, and the check that they fit the base.

Head i guesses the token i + 2 places behind the one whose hidden state x [hidden] it reads:

    argmax lm_head(x + silu(up @ (down @ x)))        down [rank, hidden], up [hidden, rank]

x is what the base's LM head reads; the LM head is the base's own. docs/adapters.md has the layout.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from contract.adapters.problems import Problem, shown
from contract.adapters.safetensors_header import FILE

MAX_HEADS = 4
MAX_HEAD_RANK = 1024
PREFIX = "draft_heads."
_NAME = re.compile(r"draft_heads\.(?P<head>[0-9]{1,3})\.(?P<part>down|up)\.weight", re.ASCII)
#: Names of tensors in LoRAX's speculators.
_MEDUSA = re.compile(
    r"(?:base_model\.model\.)?(?:medusa|[0-9]{1,3}\.[0-9]{1,3}\.(?:linear\.)?(?:weight|bias)\Z)"
)

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """One head: its rank, and the names of its tensors."""

    rank: int
    down: str
    up: str


def head_names(index: int) -> tuple[str, str]:
    """Return the names of a head's tensors: down [rank, hidden], up [hidden, rank]."""
    return f"{PREFIX}{index}.down.weight", f"{PREFIX}{index}.up.weight"


def is_head_tensor(name: str) -> bool:
    """Return whether a tensor belongs to draft heads rather than to the LoRA."""
    return name.startswith(PREFIX)


def medusa_problem(name: str) -> Problem | None:
    """Return why a tensor of LoRAX's Medusa speculators is refused; None for any other."""
    if _MEDUSA.match(name) is None:
        return None
    message = (
        "it belongs to a Medusa speculator of LoRAX, which is not supported: train draft heads "
        "(the hyperparameter draft_heads), or leave it out"
    )
    return Problem(FILE, shown(name), message)


def fit_heads(
    shapes: Mapping[str, Shape], hidden: int
) -> tuple[tuple[DraftHead, ...], list[Problem]]:
    """Return the heads in their order, none if there are problems, and the problems.

    shapes  of the tensors for which `is_head_tensor` holds; others are not looked at
    hidden  the base's hidden size
    """
    problems: list[Problem] = []
    found: set[str] = set()
    for name in filter(is_head_tensor, shapes):
        match = _NAME.fullmatch(name)
        if match is None or match["head"] != str(int(match["head"])):
            message = f"it is not a tensor of a draft head: these are {' and '.join(head_names(0))}"
            problems.append(Problem(FILE, shown(name), message))
        elif int(match["head"]) >= MAX_HEADS:
            message = f"an adapter may have at most {MAX_HEADS} draft heads: remove this one"
            problems.append(Problem(FILE, name, message))
        else:
            found.add(name)
    heads = []
    for index in range(MAX_HEADS):
        down, up = head_names(index)
        if down not in found and up not in found:
            if any(name > down for name in found):
                problems.append(
                    Problem(FILE, down, "it is missing, but a later draft head is in the file")
                )
                break
            continue
        fault = _fault(down, up, shapes, hidden)
        if fault is not None:
            problems.append(fault)
        else:
            heads.append(DraftHead(rank=shapes[down][0], down=down, up=up))
    return ((), problems) if problems else (tuple(heads), problems)


def _fault(down: str, up: str, shapes: Mapping[str, Shape], hidden: int) -> Problem | None:
    """Return what is wrong with one head."""
    for name, other in ((down, up), (up, down)):
        if name not in shapes:
            return Problem(FILE, name, f"it is missing, but its counterpart {other} is in the file")
    shape, most = shapes[down], min(hidden, MAX_HEAD_RANK)
    if len(shape) != 2 or shape[1] != hidden or not 1 <= shape[0] <= most:
        needed = f"[rank, {hidden}], a rank from 1 to {most}"
        return Problem(FILE, down, f"its shape is {list(shape)}; the base model needs {needed}")
    if shapes[up] != (hidden, shape[0]):
        needed = f"{down} and the base model need {[hidden, shape[0]]}"
        return Problem(FILE, up, f"its shape is {list(shapes[up])}; {needed}")
    return None
