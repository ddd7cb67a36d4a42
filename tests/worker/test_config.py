"""The worker's environment: what is missing or wrong is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import FAKE_NAME, FAKE_REVISION, write_fake_base
from worker.config import ConfigError, WorkerConfig


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "LORIKEET_BASE_MODEL": str(write_fake_base(tmp_path / "base")),
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "S3_ENDPOINT_URL": "http://127.0.0.1:2",
        "S3_ACCESS_KEY_ID": "id",
        "S3_SECRET_ACCESS_KEY": "secret",
    }


def test_the_base_is_known_from_its_folder(environment: dict[str, str]) -> None:
    config = WorkerConfig.from_environment(environment)
    assert (config.base_model, config.base_revision) == (FAKE_NAME, FAKE_REVISION)
    assert (config.pool, config.device, config.arena_bytes) == ("default", "cpu", None)
    assert config.s3.bucket == "lorikeet"


@pytest.mark.parametrize("name", ["LORIKEET_BASE_MODEL", "REDIS_URL", "S3_SECRET_ACCESS_KEY"])
def test_a_missing_variable_is_named(environment: dict[str, str], name: str) -> None:
    del environment[name]
    with pytest.raises(ConfigError, match=name):
        WorkerConfig.from_environment(environment)


SIZES = ("ARENA_BYTES", "MAX_ADAPTER_BYTES", "MIN_KV_BYTES", "HOST_CACHE_BYTES")


@pytest.mark.parametrize("value", ["many", "-1", "0", "1.5"])
@pytest.mark.parametrize("name", SIZES)
def test_a_number_must_be_one(environment: dict[str, str], name: str, value: str) -> None:
    environment[f"LORIKEET_{name}"] = value
    with pytest.raises(ConfigError, match=f"LORIKEET_{name}"):
        WorkerConfig.from_environment(environment)


def test_sizes_are_read(environment: dict[str, str]) -> None:
    for i, name in enumerate(SIZES):
        environment[f"LORIKEET_{name}"] = str(1000 + i)
    config = WorkerConfig.from_environment(environment)
    assert [getattr(config, name.lower()) for name in SIZES] == [1000, 1001, 1002, 1003]


def test_a_folder_that_is_no_base_model_is_refused(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    environment["LORIKEET_BASE_MODEL"] = str(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"LORIKEET_BASE_MODEL.*no config\.json"):
        WorkerConfig.from_environment(environment)


def test_secrets_may_lie_in_files(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    environment["S3_SECRET_ACCESS_KEY_FILE"] = str(tmp_path / "secret")
    config = WorkerConfig.from_environment(environment)
    assert config.s3.secret_access_key == "from a file"


def test_numbers_may_lie_in_files_too(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "threads").write_text("3\n")
    environment["LORIKEET_THREADS_FILE"] = str(tmp_path / "threads")
    assert WorkerConfig.from_environment(environment).threads == 3
    (tmp_path / "threads").write_text("many\n")
    with pytest.raises(ConfigError, match="LORIKEET_THREADS"):
        WorkerConfig.from_environment(environment)


def test_children_inherit_no_secret() -> None:
    """As the kernel shows their environment to whoever may look."""
    marks = {
        "REDIS_URL": "mark-1",
        "S3_SECRET_ACCESS_KEY": "mark-2",
        "DATABASE_URL": "mark-3",
        "LORIKEET_KEY_PEPPER": "mark-4",
        "WHATEVER_ELSE": "mark-5",
        "OMP_NUM_THREADS": "1",
    }
    code = (
        "import multiprocessing, pathlib, time\n"
        "from worker.config import drop_environment\n"
        "if __name__ == '__main__':\n"
        "    drop_environment()\n"
        "    child = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(60,))\n"
        "    child.start()\n"
        "    environ = ''\n"
        "    while not environ:  # as it is until the kernel has made the child's memory\n"
        "        environ = pathlib.Path(f'/proc/{child.pid}/environ').read_text()\n"
        "    print(environ)\n"
        "    child.kill()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | marks,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "mark-" not in done.stdout
    assert "OMP_NUM_THREADS=1" in done.stdout
