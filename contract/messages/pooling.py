"""Vectors of prompts: how hidden states become one, and how vectors are written in messages."""

from __future__ import annotations

import base64
import enum
import sys
from array import array
from collections.abc import Iterable


class Pooling(enum.StrEnum):
    """Which hidden states of a prompt its vector is made of."""

    MEAN = "mean"  # the mean of all
    LAST = "last"  # the last token's
    CLS = "cls"  # the first token's


def pack(numbers: Iterable[float]) -> str:
    """Return numbers as fp32, little-endian, in base64: as OpenAI writes an embedding."""
    packed = array("f", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def unpack(text: str) -> list[float]:
    """Return the numbers that `pack` wrote."""
    packed = array("f", base64.b64decode(text))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
