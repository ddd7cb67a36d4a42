"""A Docker engine to test with: the one that is there, or one of our own in a scratch folder.

`python -m tests.compose.docker` says whether there can be one here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

#: The variables that programs get: the tests' own settings must not replace those of .env.
PASSED = (
    *("PATH", "HOME", "USER", "LANG", "TMPDIR"),
    *("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_BUILDKIT"),
)
START_TIMEOUT_S = 60


class Missing(Exception):
    """Raised if this machine lacks something; the message says what, and what to do."""


def environment() -> dict[str, str]:
    # Compose 1.29 would build with the docker program, which may lack BuildKit.
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return passed | {"COMPOSE_DOCKER_CLI_BUILD": "0"}


def run(
    argv: Sequence[str], *, timeout_s: float = 120, check: bool = True, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output. Raises AssertionError with it when `check` fails."""
    done = subprocess.run(
        argv,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    assert not check or done.returncode == 0, (
        f"{' '.join(argv)} ended with {done.returncode}\n"
        f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done


def docker(*argv: str, timeout_s: float = 120, check: bool = True) -> str:
    return run(["docker", *argv], timeout_s=timeout_s, check=check).stdout


def inspect(what: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", what))[0]
    return found


def host_address() -> str:
    """The address of this machine at which every container reaches it."""
    form = "{{(index .IPAM.Config 0).Subnet}}"
    subnet = docker("network", "inspect", "bridge", "--format", form).strip()
    return str(next(ipaddress.ip_network(subnet).hosts()))


@contextlib.contextmanager
def engine(scratch: Path) -> Iterator[None]:
    """An engine that answers `docker`. Raises Missing."""
    if _answers():
        yield
        return
    if os.environ.get("DOCKER_HOST"):
        raise Missing(f"no Docker engine answers at DOCKER_HOST={os.environ['DOCKER_HOST']}")
    need("dockerd", "docker.io", "iptables")
    need("docker", "docker-cli")
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / "dockerd.log").open("ab") as log:
        daemon = subprocess.Popen(
            [
                *("dockerd", "--data-root", str(scratch / "data")),
                *("--exec-root", str(scratch / "exec"), "--pidfile", str(scratch / "pid")),
                *("--host", f"unix://{scratch}/docker.sock"),
            ],
            stdout=log,
            stderr=log,
        )
    os.environ["DOCKER_HOST"] = f"unix://{scratch}/docker.sock"
    try:
        _wait(daemon, scratch / "dockerd.log")
        yield
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        del os.environ["DOCKER_HOST"]


def _answers() -> bool:
    return bool(
        shutil.which("docker")
        and run(["docker", "info"], check=False, timeout_s=20).returncode == 0
    )


def _wait(daemon: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while not _answers():
        if daemon.poll() is not None or time.monotonic() > give_up_at:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise Missing(f"a Docker engine of our own does not start here; it says:\n{tail}")
        time.sleep(0.5)


def need(program: str, *packages: str) -> None:
    """Install Debian packages unless the program is there. Raises Missing."""
    if shutil.which(program):
        return
    names = " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Missing(f"{program} is missing, and only root on Debian can install it here: {names}")
    env = environment() | {"DEBIAN_FRONTEND": "noninteractive"}
    for argv in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "--quiet", *argv], env=env, capture_output=True, text=True, check=False
        )
    if not shutil.which(program):
        raise Missing(f"{program} cannot be installed ({names}):\n{done.stderr[-2000:]}")


def compose_command() -> list[str]:
    """`docker compose`, or docker-compose. Raises Missing."""
    if run(["docker", "compose", "version"], check=False).returncode == 0:
        return ["docker", "compose"]
    need("docker-compose", "docker-compose")
    return ["docker-compose"]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="lorikeet-docker-") as scratch:
        try:
            with engine(Path(scratch)):
                compose_command()
        except Missing as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
