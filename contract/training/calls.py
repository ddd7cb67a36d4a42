"""A pass that a training client asks for, as bytes between the gateway, the task and its child."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

#: The losses by name, with the tensors that each takes beside `target_tokens`.
LOSSES = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
}
#: Bounds of a pass.
MAX_TOKENS, MAX_ROWS = 131_072, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """Rows one behind the other; each token has a target.

    loss       a name of `LOSSES`; `low` and `high` bound the clipped ratio of ppo
    lengths    tokens of each row
    weights    of the loss, or advantages; `sampled`, the sampler's log-probabilities, or zeros
    """

    loss: str
    low: float
    high: float
    is_forward: bool
    lengths: Sequence[int]
    token_ids: array[int]
    targets: array[int]
    weights: array[float]
    sampled: array[float]

    def encode(self) -> bytes:
        """Return a line of JSON, and the four arrays of 4 bytes a token."""
        said = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _ARRAYS
        }
        arrays = b"".join(getattr(self, name).tobytes() for name in _ARRAYS)
        return json.dumps(said).encode() + b"\n" + arrays

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Return what `encode` wrote."""
        head, _, arrays = encoded.partition(b"\n")
        said = json.loads(head)
        size = 4 * sum(said["lengths"])
        parts: dict[str, Any] = {}
        for number, (name, kind) in enumerate(_ARRAYS.items()):
            parts[name] = array(kind, arrays[number * size : (number + 1) * size])
        return cls(**said, **parts)


_ARRAYS = {"token_ids": "i", "targets": "i", "weights": "f", "sampled": "f"}
