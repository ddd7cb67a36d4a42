"""What a web process's log lines do not say."""

from __future__ import annotations

import subprocess
import sys

TOKEN = "abc-def-123"
#: As the process starts: uvicorn sets its own loggers up, and then the application its.
PROGRAM = f"""
import logging, uvicorn
uvicorn.Config("controlplane.asgi:application").load()
for path in ("invites", "account/password/reset/key", "account/confirm-email"):
    args = ("127.0.0.1:9", "GET", f"/console/{{path}}/{TOKEN}?x=1", "1.1", 200)
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *args)
"""


def test_uvicorn_writes_no_token() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    said = done.stdout + done.stderr
    assert said.count("GET /console/") == 3, said
    assert TOKEN not in said
    assert "tenant=" in said
