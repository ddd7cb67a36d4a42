"""Each image's pins, with the files that the image gets.

Two ways: in this environment, where all that the image does not pin is refused; and, in `make
test-long`, in an environment of its own that pip makes, as the image's build does.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.dockerfile import ROOT, stages
from tests.required_settings import REQUIRED

CACHE = ROOT / ".cache" / "images"
#: As in requirements/lock.py: the pins leave out what torch's own wheels bring along.
BROUGHT_BY_TORCH = re.compile(r"nvidia-|cuda-|triton$")
#: Runs inside the image's environment: imports what its processes import, prints what is there.
CONTROL_PLANE = """
import django
django.setup()
import controlplane.asgi, controlplane.celery
controlplane.celery.app.loader.import_default_modules()
from django.core.management import call_command, get_commands
call_command("check")
assert "accountant" in get_commands()
"""
PROGRAMS = {
    "controlplane": CONTROL_PLANE,
    "trainer": CONTROL_PLANE
    + "import peft, worker.train, worker.training.base, worker.training.loop\n"
    + "import worker.dataset_report\n",
    "worker": "import worker.__main__, worker.engine_process.process, engine, kernels, outlines\n",
}
ABSENT = {
    "controlplane": (
        "torch",
        "transformers",
        "triton",
        "engine",
        "kernels",
        "worker.serving.service",
    ),
    "trainer": ("outlines",),
    "worker": ("django", "celery", "rest_framework", "psycopg", "controlplane"),
}
REPORT = """
import importlib.util
def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print("present:", [name for name in {absent!r} if has(name)])
"""
#: Comes before a program: modules that the image does not have are not found.
REFUSE = """
import sys
class Without:
    names = set({names})
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.names:
            return self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def pins_of(image: str) -> dict[str, str]:
    """Distribution -> version."""
    lines = (ROOT / "requirements" / f"{image}.txt").read_text().splitlines()
    pins = [line.split(";")[0].split() for line in lines if re.match(r"[A-Za-z0-9]", line)]
    pairs = [pin[0].split("==") for pin in pins]
    return {canonicalize_name(name.split("[")[0]): version for name, version in pairs}


def modules_of(distribution: importlib.metadata.Distribution) -> set[str]:
    """The names at the top of what it installs."""
    tops = {file.parts[0] for file in distribution.files or [] if ".." not in file.parts}
    return {top.split(".")[0] for top in tops if not top.endswith((".dist-info", ".pth", ".data"))}


@pytest.mark.parametrize("image", PROGRAMS)
def test_what_an_image_needs_is_pinned(image: str) -> None:
    """All that its pins require, in versions that fit each other."""
    pins = pins_of(image)
    for name, version in pins.items():
        found = importlib.metadata.distribution(name)
        assert found.version.partition("+")[0] == version, name
        for text in found.requires or []:
            needed = Requirement(text)
            is_wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if is_wanted and not BROUGHT_BY_TORCH.match(needed.name):
                pin = pins.get(canonicalize_name(needed.name))
                assert pin is not None, f"{name} needs {needed}"
                assert needed.specifier.contains(pin, prereleases=True), f"{name} needs {needed}"


@pytest.mark.parametrize("image", PROGRAMS)
def test_an_image_imports_what_is_pinned_alone(image: str, tmp_path: Path) -> None:
    stage = stages()[image]
    assert stage.requirements == f"requirements/{image}.txt"
    app = tmp_path / "app"
    stage.copy_into(app)
    pins, has, others = pins_of(image), set(), set()
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.name)
        is_torchs = "torch" in pins and BROUGHT_BY_TORCH.match(name)
        (has if name in pins or is_torchs else others).update(modules_of(distribution))
    refuse = REFUSE.format(names=json.dumps(sorted(others - has)))
    program = refuse + PROGRAMS[image] + REPORT.format(absent=ABSENT[image])
    assert "present: []" in _run([sys.executable, "-c", program], cwd=app)


@pytest.fixture(scope="module")
def pythons() -> dict[str, Path]:
    """Image -> the Python of an environment that has its pins and nothing else."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(PROGRAMS, pool.map(_environment, PROGRAMS), strict=True))


def _environment(image: str) -> Path:
    """Made once for each content of the pins' file.

    What `make setup` has in the pinned version is linked and not unpacked again, which would take
    minutes. pip is then told what the image's build tells it: it finds what is linked, and installs
    the rest.
    """
    requirements = ROOT / "requirements" / f"{image}.txt"
    pins = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = CACHE / f"{image}-linked-{pins}"
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    pip += ["--quiet", "--disable-pip-version-check"]
    if not (folder / "complete").exists():
        for stale in CACHE.glob(f"{image}-*"):
            shutil.rmtree(stale)
        folder.mkdir(parents=True)
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=folder)
        _link_installed(requirements.read_text().splitlines(), folder)
        _run([*pip, "install", "--no-compile", "-r", str(requirements)], cwd=folder)
        _run([*pip, "check"], cwd=folder)
        (folder / "complete").touch()
    return python


def _link_installed(pins: list[str], folder: Path) -> None:
    """Link into the environment in `folder` what the running one has of the pins.

    A distribution's commands stay out: they name the Python that they are for.
    """
    has_torch = any(pin.startswith("torch==") for pin in pins)
    major, minor = sys.version_info[:2]
    packages = folder / "lib" / f"python{major}.{minor}" / "site-packages"
    for distribution in importlib.metadata.distributions():
        version = distribution.version.partition("+")[0]  # a build for CPUs alone is named so
        pin = f"{distribution.name}=={version}".lower().replace("_", "-")
        if pin in pins or (has_torch and BROUGHT_BY_TORCH.match(distribution.name)):
            for file in distribution.files or []:
                if ".." not in file.parts:
                    _link(Path(str(distribution.locate_file(file))), packages / file)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:  # another file system
        shutil.copy(source, target)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("image", PROGRAMS)
def test_image_installs_and_imports(image: str, pythons: dict[str, Path], tmp_path: Path) -> None:
    stage = stages()[image]
    assert stage.requirements == f"requirements/{image}.txt"
    app = tmp_path / "app"
    stage.copy_into(app)
    program = PROGRAMS[image] + REPORT.format(absent=ABSENT[image])
    assert "present: []" in _run([str(pythons[image]), "-c", program], cwd=app)


def _run(argv: list[str], *, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= REQUIRED | {"DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    result = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{argv[:4]}…\n{result.stdout}\n{result.stderr}"
    return result.stdout
