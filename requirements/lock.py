"""Pin what each image installs: pyproject's extras, resolved by pip, one file per image.

    python requirements/lock.py            # all of them; or name some: dev worker

A pin that is already in the image's file stays unless pyproject.toml forbids it; with --upgrade
everything moves to its newest version.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
PYPROJECT = FOLDER.parent / "pyproject.toml"
#: Image -> the extras it installs. Training tasks run inside the control plane's Celery.
IMAGES = {
    "controlplane": ("controlplane",),
    "worker": ("worker",),
    "backup": ("backup",),
    "trainer": ("controlplane", "trainer"),
    "dev": ("controlplane", "worker", "trainer", "demo", "cli", "dev"),
}
# What torch's own wheels bring along, by the machine they are for: torch's metadata says which,
# and a file that listed them would force one kind of machine on everybody.
BROUGHT_BY_TORCH = re.compile(r"nvidia-|cuda-|triton$")


def lock(image: str, *, upgrade: bool) -> Path:
    """Resolve one image's extras and write its file."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    wanted = sorted({line for extra in IMAGES[image] for line in extras[extra]}, key=str.lower)
    target = FOLDER / f"{image}.txt"
    pins = _resolve(wanted, target if target.exists() and not upgrade else None)
    names = ", ".join(IMAGES[image])
    header = (
        f"# The extras {names} of pyproject.toml, resolved by `make lock`; not edited by hand.\n"
    )
    target.write_text(header + "".join(f"{name}=={version}\n" for name, version in pins))
    return target


def _resolve(wanted: list[str], constraints: Path | None) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        argv += ["--quiet", "--disable-pip-version-check", "--report", str(report), *wanted]
        if constraints:
            argv += ["--constraint", str(constraints)]
        if subprocess.run(argv, check=False).returncode != 0:
            raise SystemExit("pip found no set of versions: see above; try --upgrade")
        installs = json.loads(report.read_text())["install"]
    asked_for = {re.split(r"[=<>\[ ;]", line)[0].lower() for line in wanted}
    pins = []
    for install in installs:
        name = install["metadata"]["name"]
        canonical = re.sub(r"[-_.]+", "-", name).lower()
        if BROUGHT_BY_TORCH.match(canonical) and canonical not in asked_for:
            continue
        # Without the local part ("+cpu"): it says from which index the build came.
        pins.append((canonical, install["metadata"]["version"].partition("+")[0]))
    return sorted(pins)


def main() -> None:
    parser = argparse.ArgumentParser(description="Resolve pyproject's extras into pinned files.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)}")
    parser.add_argument("--upgrade", action="store_true", help="do not keep the pins there are")
    args = parser.parse_args()
    images = args.images or list(IMAGES)
    if unknown := set(images) - set(IMAGES):
        parser.error(f"no such image: {', '.join(sorted(unknown))}")
    with ThreadPoolExecutor() as pool:
        for target in pool.map(lambda image: lock(image, upgrade=args.upgrade), images):
            print(f"wrote {target.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()
