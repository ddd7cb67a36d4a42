"""What the demo prints into a file, which has no bar that moves."""

from __future__ import annotations

import io
import time
from contextlib import AbstractContextManager

import pytest
from rich.console import Console

from demo.screen import QUIET_S, Screen


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def screen(output: io.StringIO) -> Screen:
    return Screen(Console(file=output), quiet_s=0.05)


def wait_for_lines(output: io.StringIO, number: int) -> list[str]:
    give_up_at = time.monotonic() + 10
    while output.getvalue().count("\n") < number and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return output.getvalue().splitlines()


@pytest.mark.parametrize("kind", ["step", "bar"])
def test_a_silent_step_prints_a_line_again_and_again(
    screen: Screen, output: io.StringIO, kind: str
) -> None:
    shown: AbstractContextManager[object] = getattr(screen, kind)("Converted")
    with shown:
        lines = wait_for_lines(output, 3)
    assert lines[:3] == ["  Converted: 0 s so far"] * 3
    assert output.getvalue().splitlines()[-1].startswith("✓ Converted (")


def test_a_line_has_what_was_reported_last(screen: Screen, output: io.StringIO) -> None:
    with screen.bar("Trained") as report:
        report(0.25, "acme step 3/12")
        report(0.5, "acme step 6/12")
        lines = wait_for_lines(output, 1)
    assert lines[0] == "  Trained: 50% acme step 6/12, 0 s so far"


def test_nothing_is_printed_after_a_step_that_failed(screen: Screen, output: io.StringIO) -> None:
    with pytest.raises(ValueError, match="no"), screen.step("Seeded"):
        raise ValueError("no")
    time.sleep(0.15)
    assert output.getvalue() == ""


def test_ten_seconds_never_pass_without_a_line() -> None:
    assert Screen()._quiet_s == QUIET_S < 10
