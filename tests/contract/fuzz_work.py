"""In a sealed child: check many mutations of two good files; count how they end."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from contract.adapters.upload_check_process import check_upload
from contract.process.sealed_process import serve

_TOKENS = (
    b"null", b"-1", b"0", b"1e999", b"9" * 400, b'""', b"[]", b"{}", b"[" * 3000, b"true", b"\0",
    b'"\\ud800"', b"\xff\xfe", b'"__metadata__"', b'"F32"', b"NaN", b".*", b"(", b"\\1", b",", b":",
)  # fmt: skip


def mutated(noise: random.Random, content: bytes) -> bytes:
    """Change a few places of a file: bits, tokens, pieces, its end."""
    changed = bytearray(content)
    for _ in range(noise.choice((1, 1, 2, 5))):
        # Half of all changes are where the structure is: at the beginning.
        most = len(changed) if noise.random() < 0.5 else min(len(changed), 2000)
        place = noise.randrange(most + 1)
        kind = noise.randrange(6)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << noise.randrange(8)
        elif kind == 1:
            changed[place : place + noise.randrange(4)] = noise.choice(_TOKENS)
        elif kind == 2:
            del changed[place : place + noise.randrange(1, 40)]
        elif kind == 3:
            begin = noise.randrange(len(changed) + 1)
            changed[place:place] = changed[begin : begin + noise.randrange(1, 200)]
        elif kind == 4:
            del changed[place:]
        else:
            changed[:8] = noise.randrange(1 << noise.randrange(1, 64)).to_bytes(8, "little")
    return bytes(changed)


def fuzz(work: dict[str, Any], files: Sequence[BinaryIO]) -> dict[str, Any]:
    """Return how many were accepted and rejected, and the slowest check's CPU seconds."""
    config, tensors = (file.read(1 << 20) for file in files)
    noise = random.Random(work["seed"])
    ends = {"accepted": 0, "rejected": 0}
    slowest = 0.0
    for _ in range(work["rounds"]):
        both = config, tensors
        which = noise.randrange(3)
        if which != 1:
            both = mutated(noise, both[0]), both[1]
        if which != 0:
            both = both[0], mutated(noise, both[1])
        began = time.process_time()
        described = {**work, "file_bytes": len(both[1])}
        answer = check_upload(described, [io.BytesIO(content) for content in both])
        slowest = max(slowest, time.process_time() - began)
        ends["rejected" if "problems" in answer else "accepted"] += 1
        assert all(part.isascii() for problem in answer.get("problems", ()) for part in problem)
    return {**ends, "slowest_s": slowest}


if __name__ == "__main__":
    serve(fuzz)
