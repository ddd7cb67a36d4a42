"""Folders of tasks: none is left for long, and none is taken from a task that is at work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from controlplane.infra.temp_folders import scratch_folder

HOLDER = """
import sys, time
import django
from django.conf import settings
django.setup()
settings.WORK_DIR = __import__("pathlib").Path(sys.argv[1])
from controlplane.infra.temp_folders import scratch_folder
with scratch_folder("train-") as folder:
    (folder / "rows").write_bytes(b"x" * 100)
    print(folder, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_task_left_is_removed_by_the_next(settings: Any, tmp_path: Path) -> None:
    settings.WORK_DIR = tmp_path
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    )
    assert holder.stdout is not None
    folder = Path(holder.stdout.readline().strip())
    with scratch_folder("train-") as own:
        assert own.parent == tmp_path
        assert (folder / "rows").is_file()  # its task lives
    assert not own.exists()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with scratch_folder("ingest-"):
        assert folder.is_dir()  # of another kind
    with scratch_folder("train-") as own:
        assert list(tmp_path.iterdir()) == [own]
    assert not list(tmp_path.iterdir())
