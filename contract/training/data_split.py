"""Divide a dataset's rows into those to train on and those to validate with.

A row's part follows from its prompt and the dataset's salt alone: it stays in its part while rows
are added, rows of the same prompt are in the same part, and a larger share only adds to validation.
"""

from __future__ import annotations

import hashlib
import unicodedata

from contract.training.row_messages import Row

_BITS = 64


def normalised_prompt(row: Row) -> str:
    """Return the users' words before the first answer, without differences of case and blanks.

    If they say nothing, that is what the system says.
    """
    said: dict[str, list[str]] = {"system": [], "user": [], "tool": []}
    for message in row.messages:
        if message["role"] == "assistant":
            break
        said[message["role"]].append(message["content"])
    texts = [row.prompt, *(said["user"] or said["system"])]
    return " ".join(unicodedata.normalize("NFKC", "\n".join(texts)).casefold().split())


def first_prompt_digest(row: Row, salt: str = "") -> bytes:
    """Return 16 bytes that two rows share if they have the same normalised prompt."""
    text = f"{salt}\n{normalised_prompt(row)}"
    return hashlib.sha256(text.encode()).digest()[:16]


def is_validation(row: Row, share: float, salt: str) -> bool:
    """Return whether the row is used for validation, given the share of prompts that are."""
    place = int.from_bytes(first_prompt_digest(row, salt)[: _BITS // 8], "big")
    return bool(place < share * 2**_BITS)
