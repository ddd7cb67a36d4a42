"""What a web process's log lines do not say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid

import pytest

TOKEN = "abc-def-123"
SECRET = "h2Kq9sWmXv7"
KEY = f"lk_live_{SECRET}_{SECRET}"
#: As the process starts: uvicorn sets its own loggers up, and then the application its.
PROGRAM = f"""
import logging, uuid, uvicorn
uvicorn.Config("controlplane.asgi:application").load()
for path in ("invites", "account/password/reset/key", "account/confirm-email"):
    args = ("127.0.0.1:9", "GET", f"/console/{{path}}/{TOKEN}?x=1", "1.1", 200)
    logging.getLogger("uvicorn.error").info('%s - "%s %s HTTP/%s" %d', *args)
for query in (
    "api_key={KEY}", "a=b&API-Key={KEY}", "key={TOKEN}", "token={TOKEN}&x=1", "x={KEY}",
    "api%5Fkey={TOKEN}", "x={KEY.replace("_", "%5F")}", "x=%6c{KEY[1:]}", "x=l%256b{KEY[2:]}",
):
    args = ("127.0.0.1:9", "POST", f"/v1/models?{{query}}", "1.1", 401)
    logging.getLogger("uvicorn.error").info('%s - "%s %s HTTP/%s" %d', *args)
logging.getLogger("django.request").warning("Not Found: %s", "/v1/{KEY}")
try:
    raise ValueError("{KEY}")
except ValueError:
    logger = logging.getLogger("django.security.DisallowedHost")
    logger.error("Invalid HTTP_HOST header: '{KEY}'.", exc_info=True)
assert not logging.getLogger("uvicorn.access").hasHandlers()
from controlplane.tenancy.scoping import tenant_scope
with tenant_scope(uuid.UUID(int=7)):
    logging.getLogger("controlplane.test").info("as a tenant", extra={{"run_id": "run-7"}})
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_uvicorn_writes_no_token(log_format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "LORIKEET_LOG_FORMAT": log_format},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = done.stdout + done.stderr
    assert said.count("GET /console/") == 3, said
    assert said.count("POST /v1/models?") == 9, said
    assert "Not Found: /v1/" in said
    assert "Invalid HTTP_HOST" in said and "Traceback" not in said
    assert TOKEN not in said
    assert SECRET not in said
    last = said.splitlines()[-1]
    if log_format == "json":
        assert [type(json.loads(line)) for line in said.splitlines()] == [dict] * 15
        fields = json.loads(last)
        assert (fields["tenant_id"], fields["run_id"]) == (str(uuid.UUID(int=7)), "run-7")
    else:
        assert f"tenant_id={uuid.UUID(int=7)}" in last and "run_id=run-7" in last
