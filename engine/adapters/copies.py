"""PageCopier: copies an adapter from host memory into its pages of the arena, beside the steps.

Pages are in layer order. On a GPU they are copied on a stream of their own, and an event follows
each group of layers. So a prefill may start at once: before a layer, it makes its own stream wait
for that layer's event. No thread waits. On a CPU, where the copy takes a hundredth of a prefill, a
thread copies, and requests start when the copy is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from engine.adapters.host_memory import HostPages
from engine.adapters.pages import SUB_PAGES, Place
from engine.adapters.threads import start_thread

# Events per copy. More would help little: computing a layer takes longer than copying one.
_MAX_GROUPS = 8


class Arrival(Protocol):
    """One adapter's copy, which may still be running."""

    @property
    def future(self) -> Future[None] | None:
        """The future of the thread that copies; None on a GPU."""

    @property
    def is_usable(self) -> bool:
        """Return whether a step that reads the adapter may be launched, with the waits below."""

    @property
    def is_done(self) -> bool:
        """Return whether the copy is complete; raises the error if it failed."""

    def await_layer(self, layer: int) -> None:
        """Make the kernels that are launched from now on wait for the layer's pages."""

    def await_all(self) -> None:
        """Make the kernels that are launched from now on wait for all pages."""


class PageCopier:
    """Copies adapters into the pages of `arena` [P, page_elems]."""

    def __init__(self, arena: torch.Tensor) -> None:
        self._arena = arena
        self._stream: torch.cuda.Stream | None = None
        if arena.is_cuda:
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]

    def start(self, source: HostPages, place: Place) -> Arrival:
        """Start to copy the pages of `source` to their place in the arena; never waits.

        The caller leaves both as they are until the arrival is done.
        """
        assert source.tiles is not None
        if self._stream is None:
            return _ThreadCopy(start_thread(_copy, source, self._arena, place))
        # Steps that still run may read or write these pages.
        self._stream.wait_stream(torch.cuda.current_stream(self._arena.device))
        ends = source.tiles.layer_ends(self._arena.shape[1])
        events: dict[int, torch.cuda.Event] = {}
        memory, done = source.open(), 0
        with torch.cuda.stream(self._stream):
            for end in _grouped(ends):
                whole = min(end, len(place.pages))
                for first, last in _runs(source.numbers, place.pages, done, whole):
                    low, high = source.numbers[first], source.numbers[last - 1] + 1
                    rows = self._arena[place.pages[first] : place.pages[last - 1] + 1]
                    rows.copy_(memory[low:high], non_blocking=True)
                if end > whole:
                    _copy_tail(memory[source.numbers[-1]], self._arena, place.tail)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                events[end] = event
                done = end
        return _BusCopy(self._arena.device, ends, events)


class _ThreadCopy:
    def __init__(self, future: Future[None]) -> None:
        self.future: Future[None] | None = future

    @property
    def is_usable(self) -> bool:
        return self.is_done

    @property
    def is_done(self) -> bool:
        assert self.future is not None
        if not self.future.done():
            return False
        self.future.result()
        return True

    def await_layer(self, layer: int) -> None:
        raise AssertionError("a step reads an adapter that is not there")

    def await_all(self) -> None:
        self.await_layer(0)


class _BusCopy:
    def __init__(
        self, device: torch.device, ends: list[int], events: dict[int, torch.cuda.Event]
    ) -> None:
        self.future: Future[None] | None = None
        self._device = device
        # For each layer, the event of the first group that holds all its pages.
        self._events = [events[next(group for group in events if group >= end)] for end in ends]
        self._last = events[max(events)]

    @property
    def is_usable(self) -> bool:
        return True

    @property
    def is_done(self) -> bool:
        return bool(self._last.query())  # type: ignore[no-untyped-call]

    def await_layer(self, layer: int) -> None:
        if layer == 0 or self._events[layer] is not self._events[layer - 1]:
            torch.cuda.current_stream(self._device).wait_event(self._events[layer])

    def await_all(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._last)


def _grouped(ends: Sequence[int]) -> list[int]:
    """Return the ends of at most `_MAX_GROUPS` groups of pages, in order."""
    step = -(-len(ends) // _MAX_GROUPS)
    chosen = {ends[min(i + step, len(ends)) - 1] for i in range(0, len(ends), step)}
    return sorted(end for end in chosen if end) or [ends[-1]]


def _runs(sources: list[int], targets: list[int], first: int, end: int) -> list[tuple[int, int]]:
    """Cut [first, end) into runs of pages that are adjacent both in host memory and the arena."""
    runs = []
    start = first
    for i in range(first + 1, end + 1):
        if i == end or sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1:
            runs.append((start, i))
            start = i
    return [run for run in runs if run[0] < run[1]]


@torch.inference_mode()
def _copy(source: HostPages, arena: torch.Tensor, place: Place) -> None:
    rows = list(source.rows())
    for page, row in zip(place.pages, rows, strict=False):
        arena[page].copy_(row)
    _copy_tail(rows[-1], arena, place.tail)


def _copy_tail(page: torch.Tensor, arena: torch.Tensor, tail: list[int]) -> None:
    if tail:
        sub_pages, targets = page.view(SUB_PAGES, -1), arena.view(-1, len(page) // SUB_PAGES)
        for i, sub_page in enumerate(tail):
            targets[sub_page].copy_(sub_pages[i], non_blocking=True)
