"""A sealed child that does its worst: what it cannot do, and how it ends."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from controlplane.infra.sealed_child import Bounds, Broken, Ended, Lost, OverBounds, run_sealed

HOSTILE = "tests.contract.hostile_work"
SECRETS = ("DATABASE_URL", "REDIS_URL", "S3_SECRET_ACCESS_KEY", "SECRET_KEY")
BOUNDS: dict[str, Any] = {
    "memory_bytes": 64 << 20,
    "cpu_s": 2,
    "wall_s": 20.0,
    "answer_bytes": 100_000,
}


def run(
    tmp_path: Path, act: str, environment: Mapping[str, str] | None = None, **bounds: Any
) -> Ended:
    (tmp_path / "act").write_text(act)
    with (tmp_path / "act").open("rb") as file:
        return run_sealed(
            HOSTILE,
            {"parent": os.getpid()},
            [file],
            environment=environment or {},
            bounds=Bounds(**{**BOUNDS, **bounds}),
        )


@pytest.mark.parametrize(
    "act",
    [
        *("open a socket", "open a local socket", "make a pair of sockets"),
        *("read the parent's environment", "read the parent's memory", "read its own environment"),
        *("read a file", "list a folder", "write a file", "duplicate a descriptor", "make a pipe"),
        *("fork", "start a program", "start a thread", "signal the parent", "trace the parent"),
        *("copy the parent's memory", "raise its limits", "become another user"),
    ],
)
def test_the_kernel_refuses(tmp_path: Path, act: str) -> None:
    ended = run(tmp_path, act)
    assert ended.walls == ("limits", "seccomp")
    assert ended.answer in ({"refused": errno.EPERM}, {"refused": 0})


@pytest.mark.parametrize(
    "act",
    [
        *("open a socket", "make a pair of sockets", "read the parent's environment"),
        *("read the parent's memory", "read a file", "write a file", "make a pipe"),
    ],
)
def test_without_seccomp_no_descriptor_can_be_opened(tmp_path: Path, act: str) -> None:
    ended = run(tmp_path, act, {"WITHOUT_SECCOMP": "1"})
    assert ended.walls == ("limits",)
    assert ended.answer == {"refused": errno.EMFILE}


def test_it_gets_no_secret(tmp_path: Path, settings: Any) -> None:
    told = run(tmp_path, "tell its environment", settings.TRAINER_ENVIRONMENT).answer
    assert not told.keys() & set(SECRETS)
    assert settings.DATABASES["default"]["NAME"] not in " ".join(told.values())
    assert settings.S3_SECRET_ACCESS_KEY not in told.values()


@pytest.mark.parametrize("act", ["allocate 2 GB", "hoard"])
def test_memory_is_bounded(tmp_path: Path, act: str) -> None:
    with pytest.raises(OverBounds, match="more than 64 MB of memory"):
        run(tmp_path, act)


@pytest.mark.parametrize("act", ["spin", "ignore the limit and spin"])
def test_time_is_bounded(tmp_path: Path, act: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(OverBounds, match="more than 1 s of CPU time"):
        run(tmp_path, act, cpu_s=1)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 4


def test_a_child_without_time_is_lost(tmp_path: Path) -> None:
    with pytest.raises(Lost, match="too little time"):
        run(tmp_path, "hang", wall_s=0.5)


def test_a_child_that_is_killed_from_outside_is_lost(tmp_path: Path) -> None:
    killed = threading.Thread(target=_kill_child_with, args=(b"hostile_work",))
    killed.start()
    with pytest.raises(Lost, match="from outside"):
        run(tmp_path, "hang")
    killed.join()


def _kill_child_with(word: bytes) -> None:
    for _ in range(1000):
        if (pid := _child_with(word)) is not None:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.01)


def _child_with(word: bytes) -> int | None:
    """The process of ours with this word in its command line."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"PPid:\t{os.getpid()}\n" in (path / "status").read_text()
            if is_ours and word in (path / "cmdline").read_bytes():
                return int(path.name)
        except OSError:
            continue
    return None


def test_an_endless_answer_is_cut(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="too long"):
        run(tmp_path, "flood")


def test_a_crash_is_told_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="-11"):
        run(tmp_path, "crash")


def test_a_failure_is_told_without_what_it_quotes(tmp_path: Path) -> None:
    with pytest.raises(Broken, match=r"KeyError at .*hostile_work\.py:\d+") as caught:
        run(tmp_path, "fail")
    assert "secret" not in str(caught.value)


def test_a_child_that_cannot_be_started_is_lost(tmp_path: Path) -> None:
    (tmp_path / "act").write_text("hang")
    with (tmp_path / "act").open("rb") as file, pytest.raises(Lost, match="could not be started"):
        too_much = {"X": "x" * (1 << 20)}
        run_sealed(HOSTILE, {}, [file], environment=too_much, bounds=Bounds(**BOUNDS))


def test_nothing_is_left_running(tmp_path: Path) -> None:
    with pytest.raises(Lost):
        run(tmp_path, "hang", wall_s=0.3)
    assert _child_with(b"hostile_work") is None


def test_the_files_are_given_open(tmp_path: Path) -> None:
    """The child gets descriptors alone: no path of the scratch folder."""
    (tmp_path / "act").write_text("read a file")
    with (tmp_path / "act").open("rb") as file:
        assert isinstance(file, io.BufferedReader)
        (tmp_path / "act").unlink()
        ended = run_sealed(HOSTILE, {}, [file], environment={}, bounds=Bounds(**BOUNDS))
    assert ended.answer == {"refused": errno.EPERM}
