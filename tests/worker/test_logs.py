"""What Python itself says of a failure is a line of ours, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from contract.process.log_lines import log_uncaught

ROOT = Path(__file__).parents[2]
_CONFIGURE = {
    "worker": "from worker.logs import configure_logs; configure_logs('json')",
    "control plane": (
        "import os\n"
        "os.environ.update(DJANGO_SETTINGS_MODULE='tests.settings', LORIKEET_LOG_FORMAT='json')\n"
        "import django; django.setup()"
    ),
}
_FAIL = """
import threading

class Held:
    def __del__(self):
        raise ValueError("the last words, Bearer abcdefghijklmnop1")

def fail():
    raise KeyError("Bearer abcdefghijklmnop1")

thread = threading.Thread(target=fail, name="reader")
thread.start()
thread.join()
Held()
"""


@pytest.mark.parametrize("configure", _CONFIGURE.values(), ids=_CONFIGURE)
def test_what_nobody_catches_is_a_line(configure: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{configure}\n{_FAIL}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    thread, ignored = map(json.loads, done.stderr.splitlines())
    assert (thread["event"], thread["thread_name"]) == ("thread ended", "reader")
    assert thread["exception"][0]["exc_type"] == "KeyError"
    assert ignored["where"] == "Held.__del__" and ignored["level"] == "error"
    assert ignored["exception"][0]["exc_value"].startswith("the last words")
    assert "abcdefghijklmnop" not in done.stderr


def test_hooks_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", print)
    log_uncaught()
    assert sys.unraisablehook is print
