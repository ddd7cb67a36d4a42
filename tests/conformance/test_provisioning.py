"""docs/provisioning.md: its commands, in their order, bring up a tenant from nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.live import ROOT, LiveStack
from tests.tiny_base import ROOMY_NAME

PAGE = ROOT / "docs" / "provisioning.md"
BASE_MODEL = "smollm2-135m-instruct"
#: Stands for the installation's own, of which the page uses one command.
DOCKER = """
docker() {
    while [ "$1" != python ]; do shift; done
    shift
    (cd "$ROOT" && "$PYTHON" "$@")
}
"""
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_the_page_provisions_a_tenant(live: LiveStack, tmp_path: Path) -> None:
    _, url = live.with_pool("provisioning").start_web("provisioning", DATABASE_POOL_SIZE="2")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"tensors")
    (tmp_path / "invoices.jsonl").write_text(2 * (json.dumps(ROW) + "\n"))
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 7
    # Between two blocks, so that the end of each is seen.
    script = "\necho; echo =====\n".join(blocks).replace(BASE_MODEL, ROOMY_NAME)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", DOCKER + script],
        env={
            **os.environ,
            **live.env,
            "ROOT": str(ROOT),
            "PYTHON": sys.executable,
            "LORIKEET_URL": url,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    _, _, made, again, upload, train, seen = (part.split() for part in done.stdout.split("=====\n"))
    assert json.loads("".join(made))["dry_run"] is True
    assert (again, upload, seen) == (["unchanged"], ["uploaded"], ["invoices"])
    assert train == ["2", "created", "queued"]
