"""manage.py is told to end before its command listens: as a container's first process it must."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.conftest import ROOT


def test_it_ends_when_told_to_while_it_starts() -> None:
    code = "import time; print('here', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "manage.py", "shell", "--no-imports", "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
