"""Hooks: what a package tells or asks the packages above it, which it may not import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Hook(Generic[P, T]):
    """Functions that packages above connect in `AppConfig.ready`.

    Calling the hook calls all of them, in the order in which they were connected, and returns what
    they returned. The first error ends the call.

        before_name = Hook[[str], None]()              # in the package below
        users.before_name.connect(adapter_name_check)  # in a package above
    """

    def __init__(self) -> None:
        self._functions: tuple[Callable[P, T], ...] = ()

    def connect(self, function: Callable[P, T]) -> None:
        self._functions += (function,)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return [function(*args, **kwargs) for function in self._functions]
