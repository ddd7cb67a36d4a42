"""The inspector's child: bounded in time, memory and words, and without secrets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from contract.adapters.inspection import InspectJob
from controlplane.evaluations.inspections import child
from controlplane.evaluations.inspections.child import InspectionFailed, memory_limit, run_inspector


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run this instead of `worker.inspect_adapter`."""

    def run(code: str) -> Any:
        package = tmp_path / "path" / "worker"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "inspect_adapter.py").write_text(code)
        environment = {**settings.TRAINER_ENVIRONMENT, "PYTHONPATH": str(package.parent)}
        job = InspectJob(base_model_dir=tmp_path, adapter_dir=tmp_path)
        # The child's own folder comes first on its path: it must not be this repository's.
        return run_inspector(job, tmp_path, environment=environment, cwd=package.parent)

    return run


def test_it_answers_and_has_no_secret(run: Any) -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    found = run(code)
    assert found["HF_HUB_OFFLINE"] == "1"
    secrets = {"DATABASE_URL", "REDIS_URL", "S3_SECRET_ACCESS_KEY", "LORIKEET_KEY_PEPPER"}
    assert not secrets & set(found)


def test_one_that_hangs_is_killed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "TIMEOUT_S", 0.5)
    with pytest.raises(InspectionFailed, match=r"took longer than 0\.5 s"):
        run("import time; time.sleep(60)")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("while True: print('x' * 10_000_000)", "printed too much"),
        ("print('{')", "printed no JSON"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
    ids=["endless", "not json", "exit code", "killed"],
)
def test_what_goes_wrong_is_said(run: Any, code: str, said: str) -> None:
    with pytest.raises(InspectionFailed, match=said):
        run(code)


def test_the_limit_of_memory_leaves_room_for_the_base_in_fp32() -> None:
    gib = 1 << 30
    assert memory_limit(8 * gib, 0) >= 2 * 8 * gib + 2 * gib
    assert sys.maxsize > memory_limit(140 * gib, 2 * gib)
