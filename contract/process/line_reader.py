"""Divide bytes that arrive in pieces into lines, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def lines(found: Iterable[bytes], *, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of some bytes, without their line ends.

    A line that is longer than `max_bytes` is cut after `max_bytes` + 1 bytes: this bounds memory.
    """
    kept, is_cut = bytearray(), False
    for piece in found:
        head, *tail = piece.split(b"\n")
        for index, part in enumerate([head, *tail]):
            if index:
                yield bytes(kept)
                kept, is_cut = bytearray(), False
            if not is_cut:
                kept += part[: max_bytes + 1 - len(kept)]
                is_cut = len(kept) > max_bytes
    if kept:
        yield bytes(kept)
