"""A setting that is wrong is named, with what it may be; also by a process that starts with it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane.infra.variables import Variables
from tests.required_settings import REQUIRED

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("text", ["", "many", "1.5", "-1", "11", "nan", "inf", "1e1", "9" * 5000])
def test_a_number_that_is_none_is_named(text: str) -> None:
    read = Variables({"NUMBER": text})
    if not text:
        assert read.number("NUMBER", 3, 0, 10) == 3
        return
    with pytest.raises(
        ImproperlyConfigured, match=r"NUMBER is '.*, not a whole number from 0 to 10"
    ):
        read.number("NUMBER", 3, 0, 10)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-0.5", "1e400", "x"])
def test_a_time_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"TIME is '.*, not a number from 0 on"):
        Variables({"TIME": text}).number("TIME", 1.0)


def test_what_is_a_number_is_read() -> None:
    read = Variables({"A": " 12 ", "B": "0.25", "C": str(2**60)})
    assert (read.number("A", 1), read.number("B", 1.0), read.number("C", 1)) == (12, 0.25, 2**60)
    assert math.isclose(read.number("A", 1.0), 12.0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"SECRET_FILE: .*No such file"):
        Variables({"SECRET_FILE": str(tmp_path / "none")}).text("SECRET")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LORIKEET_USAGE_DAYS": "7"}, "LORIKEET_USAGE_DAYS is '7'"),
        ({"LORIKEET_TENANT_DELETION_GRACE_DAYS": "-1"}, "LORIKEET_TENANT_DELETION_GRACE_DAYS is"),
        ({"LORIKEET_MAX_WAIT_S": "a minute"}, "LORIKEET_MAX_WAIT_S is 'a minute'"),
        (
            {"LORIKEET_TRAINING_SOCKET": "/run/training/w.sock", "LORIKEET_TRAIN_BATCH": "1"},
            "LORIKEET_TRAINING_SOCKET needs LORIKEET_TRAIN_BATCH above 1",
        ),
    ],
)
def test_the_last_line_of_a_process_that_cannot_start_names_it(
    variables: dict[str, str], said: str
) -> None:
    ended = settings_of(variables, "pass")
    assert ended.returncode != 0
    assert said in ended.stderr.strip().splitlines()[-1]


def test_a_socket_alone_has_the_worker_train_many_runs() -> None:
    show = "print(settings.TRAIN_BATCH)"
    assert settings_of({}, show).stdout == "1\n"
    with_one = settings_of({"LORIKEET_TRAINING_SOCKET": "/run/training/w.sock"}, show)
    assert with_one.stdout == "64\n", with_one.stderr


def settings_of(variables: dict[str, str], script: str) -> subprocess.CompletedProcess[str]:
    """Import the settings under these variables in a process of its own, and run a line."""
    return subprocess.run(
        [sys.executable, "-c", f"from controlplane import settings; {script}"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **REQUIRED, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
