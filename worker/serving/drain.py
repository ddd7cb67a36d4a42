"""Drain: whether a worker takes requests, and who may change that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Drain:
    """Tells whether a worker takes requests. An order can end a drain that an order began."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._resumed = asyncio.Event()
        self._has_pulled = asyncio.Event()  # nothing is being pulled, and nothing will be
        self._is_final = False

    @property
    def is_on(self) -> bool:
        return self._begun.is_set()

    @property
    def has_pulled(self) -> bool:
        """Return whether all that was being pulled at the drain's begin has arrived."""
        return self._has_pulled.is_set()

    def begin(self, *, is_final: bool) -> None:
        self._is_final = self._is_final or is_final
        self._begun.set()

    def resume(self) -> None:
        """End the drain, unless it is final."""
        if self.is_on and not self._is_final:
            self._begun.clear()
            self._resumed.set()

    async def begun(self) -> None:
        await self._begun.wait()

    async def pulled(self) -> None:
        await self._has_pulled.wait()

    def note_pulled(self) -> None:
        self._has_pulled.set()

    async def pull_between(self, pull: Callable[[], Awaitable[None]]) -> None:
        """Call `pull`, which returns when a drain begins, now and after each drain that ended."""
        while True:
            self._has_pulled.clear()
            await pull()
            self._has_pulled.set()
            await self._resumed.wait()
            self._resumed.clear()
