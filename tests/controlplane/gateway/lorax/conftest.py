"""lorax-client, as it comes from the package index, in a virtual environment of its own.

Its pins are not ours. The environment is made once and kept in .cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CACHE = HERE.parents[3] / ".cache"


def client_python() -> Path:
    """The interpreter of an environment that has exactly the pinned packages."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = CACHE / f"lorax-client-{digest}"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="lorax-client-", dir=CACHE))
        try:
            subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
            install = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
            install += ["--disable-pip-version-check", "-r", str(REQUIREMENTS)]
            subprocess.run(install, check=True, env=_clean_environment())
            os.rename(made, folder)  # whole or not at all, also when two sessions make it
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder / "bin" / "python"


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


class LoraxClient:
    """lorax-client in another process, for one server and key."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [str(client_python()), str(HERE / "program.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_clean_environment(),
        )

    def ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def call(self, name: str, url: str, key: str, *, kind: str = "sync", **arguments: Any) -> Any:
        """What the client's method returned, as JSON, or {"error", "message"}."""
        headers = {"Authorization": f"Bearer {key}"}
        request = {"kind": kind, "call": name, "url": url, "headers": headers}
        answer = self.ask({**request, "arguments": arguments})
        return answer.get("result", answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def lorax_client() -> Iterator[LoraxClient]:
    client = LoraxClient()
    yield client
    client.close()
