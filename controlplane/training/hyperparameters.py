"""What a training may be asked for. The trainer checks again; a test holds the two together."""

from __future__ import annotations

import re
from typing import Any

from controlplane.errors import InvalidRequest

#: Name -> (whole numbers only, least, most). What is left out takes the trainer's default.
BOUNDS: dict[str, tuple[bool, float, float]] = {
    "rank": (True, 1, 256),
    "alpha": (False, 0.001, 4096),
    "epochs": (False, 0.001, 100),
    "max_steps": (True, 1, 1_000_000),
    "batch_size": (True, 1, 256),
    "learning_rate": (False, 1e-7, 1),
    "warmup_steps": (True, 0, 10_000),
    "max_length": (True, 8, 32_768),
    "seed": (True, 0, 2**31 - 1),
}
MAX_TARGETS = 16
_MODULE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)


def check(fields: Any) -> dict[str, Any]:
    """The hyperparameters, unchanged. Raises InvalidRequest naming the first that is wrong."""
    if not isinstance(fields, dict):
        raise InvalidRequest("It must be an object.", param="hyperparameters")
    for name, value in fields.items():
        param = f"hyperparameters.{name[:64]}"
        if name == "target_modules":
            _check_targets(value, param)
        elif name not in BOUNDS:
            known = ", ".join([*BOUNDS, "target_modules"])
            raise InvalidRequest(
                f"There is no such hyperparameter; there are: {known}.", param=param
            )
        else:
            _check_number(value, param, *BOUNDS[name])
    return fields


def _check_number(value: Any, param: str, is_whole: bool, least: float, most: float) -> None:
    types: tuple[type, ...] = (int,) if is_whole else (int, float)
    # Written so that NaN, which compares with nothing, is refused.
    if type(value) not in types or not least <= value <= most:
        kind = "a whole number" if is_whole else "a number"
        raise InvalidRequest(f"It must be {kind} from {least:g} to {most:g}.", param=param)


def _check_targets(value: Any, param: str) -> None:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TARGETS:
        raise InvalidRequest(f"It must be a list of 1 to {MAX_TARGETS} layer names.", param=param)
    for index, name in enumerate(value):
        if not isinstance(name, str) or not _MODULE_NAME.fullmatch(name):
            raise InvalidRequest("It must be the name of a linear layer.", param=f"{param}.{index}")
