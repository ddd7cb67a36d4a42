"""Installations whose processes end with the tests of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from demo.stack import EmbeddedStack
from tests.controlplane.maintenance.installation import Installation, Make


@pytest.fixture(scope="module")
def installed(stack: EmbeddedStack) -> Iterator[Make]:
    """Makes installations, which end with the tests."""
    with contextlib.ExitStack() as ends:

        def make(name: str, **options: Any) -> Installation:
            made = Installation(stack, name, **options)
            ends.callback(made.close)
            return made

        yield make
