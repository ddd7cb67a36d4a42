"""Processes of pytest share one list of tests: the lanes of `make test`.

All collect the same tests. Each takes the next group that no lane has taken yet, until none is
left, so that they end at about the same time. A group is a module, or a package whose tests
share a running platform. A test marked `alone` measures how soon something happens: the other lanes
do nothing meanwhile.

What fails is noted in the lanes' folder, so that `.ci/test` can run it again alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import pytest

TESTS = Path(__file__).parent
#: Packages whose tests share a running platform.
TOGETHER = ("browser", "conformance", "e2e")
#: Functions that `make test-quick` is without, although it runs others of their modules: all that
#: take more than `SLOW_S` of a processor, with all their cases. `NOTE_SLOW=1 make test-quick` adds
#: those that have become so.
SLOW_TESTS = TESTS / "slow_tests.txt"
SLOW_S = 0.3
#: Functions that take many seconds of a lane, with all their cases: more than half of the time of
#: all tests. `make test-all`, which CI runs, has them all. `make test` has none, and of those with
#: a number behind them one case in so many.
LARGE_TESTS = TESTS / "large_tests.txt"
#: What takes more than three seconds of a processor, the longest first. These begin first, and
#: `make test-quick` is without them.
SLOW = (
    "deploy/test_images.py",
    "e2e",
    "conformance",
    "browser",
    "controlplane/training/test_execution.py",
    "worker/test_pressure.py",
    "worker/test_histories.py",
    "controlplane/files/batches",
    "worker/test_faults.py",
    "demo",
    "worker/training/test_train.py",
    "worker/training/test_validation.py",
    "worker/test_train_many_control.py",
    "worker/test_train_beside.py",
    "worker/inspection",
    "controlplane/queue/test_residency.py",
    "worker/test_train_many.py",
    "engine/adapters/test_formats.py",
    "engine/training/test_batch.py",
    "engine/training/test_operations.py",
    "engine/execution/test_gpu_engine.py",
    "engine/execution/test_gpu_prompt_logprobs.py",
    "engine/drafts",
    "engine/dash/test_examples.py",
    "controlplane/gateway/lorax",
    "controlplane/gateway/responses",
    "controlplane/maintenance/test_backup.py",
    "controlplane/test_contract.py",
    "controlplane/deletion",
    "controlplane/adapters/test_cut_uploads.py",
    "kernels",
    "controlplane/test_asgi.py",
    "controlplane/console/test_playground_stream.py",
    "worker/test_schema_proof.py",
    "controlplane/gateway/test_postgres_away.py",
    "worker/test_away.py",
    "worker/test_endings.py",
    "worker/test_lost_replies.py",
    "controlplane/gateway/test_bounded_http.py",
    "controlplane/queue/test_batch_reply_stream.py",
    "deploy/test_postgres_roles.py",
    "controlplane/operator/test_lists.py",
    "engine/test_games.py",
    "engine/model/test_families.py",
    "engine/model/test_quantization.py",
    "engine/model/test_fp8.py",
    "engine/model/test_int4.py",
    "engine/test_footprint.py",
    "worker/training/test_train_families.py",
    "controlplane/training/test_bounds.py",
    "controlplane/training/test_judged.py",
    "controlplane/evaluations/test_batch_scores.py",
    "worker/grammar/test_grammars.py",
    "engine/execution/test_arena.py",
    "engine/execution/test_gpu_families.py",
    "engine/execution/test_gpu_delta.py",
    "engine/execution/test_ahead.py",
    "engine/execution/test_gpu_model.py",
    "engine/execution/test_masks_ahead.py",
    "engine/beside",
    "engine/test_continuations.py",
    "engine/adapters/test_extras.py",
    "engine/dash/test_dash.py",
    "engine/execution/test_prompt_logprobs.py",
    "engine/test_machine.py",
    "engine/execution/test_turnover.py",
    "engine/adapters/test_tiers.py",
    "controlplane/maintenance/test_doctor.py",
    "controlplane/management/test_adapters.py",
    "controlplane/tenancy/test_isolation.py",
    "controlplane/adapters/test_uploads.py",
    "worker/test_redis_walls.py",
    "engine/adapters/test_adapter_pages.py",
    "engine/test_bare_machine.py",
    "controlplane/management/test_training.py",
    "worker/test_real_engine.py",
    "controlplane/management/test_openapi.py",
    "controlplane/usage/limits/test_quotas.py",
    "worker/test_replaced.py",
    "engine/sampling/test_sampler_reference.py",
    "engine/test_programs.py",
    "engine/memory/test_windows.py",
    "engine/test_oracle.py",
    "engine/dash/test_hub.py",
    "controlplane/adapters/test_bad_uploads.py",
    "controlplane/adapters/test_retirement.py",
    "controlplane/infra/test_sealed_child.py",
    "contract/test_tensor_values.py",
    "controlplane/adapters/test_files_fuzzed.py",
    "controlplane/adapters/test_configs_fuzzed.py",
    "controlplane/console/signin/test_oidc.py",
    "controlplane/test_broker.py",
    "engine/sampling/test_sampler.py",
    "engine/memory/test_prefix_cache.py",
    "engine/adapters/test_peft_forms.py",
    "controlplane/console/test_requests.py",
    "controlplane/adapters/test_ingest.py",
    "controlplane/events/audit/test_trail.py",
    "controlplane/queue/test_accountant.py",
    "controlplane/tenants/test_key_grants.py",
    "controlplane/tenants/test_people.py",
    "controlplane/management/test_base.py",
    "controlplane/console/test_access.py",
    "controlplane/console/test_roles.py",
    "controlplane/console/test_session.py",
    "contract/test_safetensors_header.py",
    "controlplane/queue/test_admission.py",
    "controlplane/training/test_schedules.py",
    "controlplane/operator",
    "contract/test_upload_check.py",
    "controlplane/adapters/test_orphaned_objects.py",
    "controlplane/console/test_members.py",
    "controlplane/requestlog/test_log.py",
    "controlplane/training/test_services.py",
    "cli",
)


def run(session: pytest.Session, folder: Path) -> None:
    """Run this lane's share of the session's tests.

    folder  empty when the lanes start, and the same for all
    """
    session.config.pluginmanager.register(Failures(folder))
    items = _taken(session.items, folder)
    item = next(items, None)
    with _Turn(folder) as turn:
        while item is not None:
            following = next(items, None)
            turn.begin(is_alone=item.get_closest_marker("alone") is not None)
            with _noted_seconds(folder, item):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following


class Failures:
    """Writes the node ids of tests that failed to `folder`/failed, one a line, for all lanes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "failed"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def _taken(items: list[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    """The tests of this lane, which takes a group when it asks for the first of it."""
    # pytest-django has a module's tests in up to three places: those that empty the database last.
    groups = [(name, list(group)) for name, group in itertools.groupby(items, _group)]
    order = sorted(range(len(groups)), key=lambda number: _rank(groups[number][0]))
    for number in order:
        with contextlib.suppress(FileExistsError):
            (folder / f"group-{number}").mkdir()
            yield from groups[number][1]


def _group(item: pytest.Item) -> str:
    path = item.path.relative_to(TESTS)
    return path.parts[0] if path.parts[0] in TOGETHER else str(path)


@functools.cache
def _rank(group: str) -> int:
    return next((rank for rank, name in enumerate(SLOW) if _is_in(group, name)), len(SLOW))


def _is_in(group: str, name: str) -> bool:
    return f"{group}/".startswith(f"{name}/")


@functools.cache
def is_slow_path(path: Path) -> bool:
    """Whether it is a slow group's module or folder."""
    return path.is_relative_to(TESTS) and _rank(str(path.relative_to(TESTS))) < len(SLOW)


def is_slow(item: pytest.Item) -> bool:
    """Whether the test is one of a slow group, or slow, or starts the live platform."""
    if is_slow_path(item.path) or _function(item.nodeid) in _slow_tests():
        return True
    return "live" in getattr(item, "fixturenames", ())


def large(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that `make test` leaves out."""
    left_out, seen = [], Counter[str]()
    for item in items:
        function = _function(item.nodeid)
        if (one_in := _large_tests().get(function)) is not None:
            if not one_in or seen[function] % one_in:
                left_out.append(item)
            seen[function] += 1
    return left_out


def _function(nodeid: str) -> str:
    """The test's function, from the folder of the tests on."""
    return nodeid.split("[", 1)[0].removeprefix("tests/")


@functools.cache
def _slow_tests() -> frozenset[str]:
    return frozenset(SLOW_TESTS.read_text().split())


@functools.cache
def _large_tests() -> dict[str, int]:
    """Functions, and of how many cases one stays; 0: none."""
    lines = [line.split() for line in LARGE_TESTS.read_text().splitlines()]
    return {name: int(one_in[0]) if one_in else 0 for name, *one_in in lines}


@contextlib.contextmanager
def _noted_seconds(folder: Path, item: pytest.Item) -> Iterator[None]:
    """Note in `folder`/seconds what a test takes of the processor, its processes included."""
    before = sum(os.times()[:4])
    yield
    with (folder / "seconds").open("a") as file:
        file.write(f"{sum(os.times()[:4]) - before:.3f} {_function(item.nodeid)}\n")


def note_slow(seconds: Path) -> None:
    """Add to SLOW_TESTS what takes more than SLOW_S by a run's notes."""
    total: dict[str, float] = defaultdict(float)
    for line in seconds.read_text().splitlines():
        value, function = line.split(" ", 1)
        total[function] += float(value)
    # The tests of a machine of hypothesis have no function of their own.
    slow = (function for function, value in total.items() if value > SLOW_S)
    found = {function for function in slow if not function.endswith("::runTest")}
    SLOW_TESTS.write_text("".join(f"{name}\n" for name in sorted(found | _slow_tests())))


class _Turn:
    """What the next test of this lane needs: to run beside the other lanes, or alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_alone = False

    def __enter__(self) -> _Turn:
        self._door: IO[str] = (self._folder / "door").open("w")
        self._room: IO[str] = (self._folder / "room").open("w")
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()
        self._room.close()

    def begin(self, *, is_alone: bool) -> None:
        """Wait until the next test may run. What is alone stays alone until another kind begins."""
        if is_alone and self._is_alone:
            return
        fcntl.flock(self._room, fcntl.LOCK_UN)
        # Whoever waits for the room holds the door, so that nobody overtakes who would be alone.
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)
        self._is_alone = is_alone


if __name__ == "__main__":
    note_slow(Path(sys.argv[1]))
