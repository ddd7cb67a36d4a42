"""The commands of docs/training.md do what they say; a run waits, as nothing trains here.

$URL, $KEY and $ID are what a reader has. The page's S3 is none that answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.client import ManagementClient
from demo.seed import ROOT
from tests.e2e.system import System

PAGE = ROOT / "docs" / "training.md"
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)
#: An answer that is an error ends the block.
SHELL = 'curl() { command curl --silent --show-error --fail-with-body "$@"; echo; }\n'
PYTHON = """
import os
from pathlib import Path
import openai, requests
URL, KEY = os.environ["URL"], {"Authorization": "Bearer " + os.environ["KEY"]}
client = openai.OpenAI(base_url=URL + "/v1", api_key=os.environ["KEY"])
answered = requests.post
def post(*args, **options):
    answer = answered(*args, **options)
    print(answer.text)
    answer.raise_for_status()
requests.post = post
"""


def loop_block() -> str:
    """Return the page's beginning of a loop with Tinker's client."""
    blocks: list[tuple[str, str]] = _BLOCK.findall(PAGE.read_text())
    return next(text for _, text in blocks if "tinker." in text)


@pytest.fixture
def client(system: System) -> Iterator[ManagementClient]:
    with contextlib.closing(system.management()) as client:
        yield client
        cancel_runs(client)
        for path in ("adapters/invoices/schedule", "datasets/page/source"):
            with contextlib.suppress(json.JSONDecodeError):  # it says nothing
                client.call("DELETE", path)


def cancel_runs(client: ManagementClient) -> None:
    for run in client.call("GET", "training-runs?adapter=invoices")["data"]:
        if run["status"] == "queued":
            client.call("POST", f"training-runs/{run['id']}/cancel")


def test_the_pages_commands_run(system: System, client: ManagementClient, tmp_path: Path) -> None:
    assert system.tenants["acme"].adapter == "invoices"
    (tmp_path / "chats.jsonl").write_bytes((ROOT / "demo" / "data" / "acme.jsonl").read_bytes())
    rows = re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "prompts.jsonl").write_text(2 * next(row for row in rows if '"lamps"' in row))
    there = {
        # Other pages have made a dataset of that name.
        "name=chats": "name=page",
        "datasets/chats/": "datasets/page/",
        '"dataset": "chats"': '"dataset": "page"',
        "https://s3.eu-central-1.amazonaws.com": "http://127.0.0.1:9",  # nobody answers
        "AKIA…": "AKIA",
        '"…"': '"secret"',
    }
    env = {**os.environ, "URL": system.base_url, "KEY": system.tenants["acme"].api_key}
    printed = []
    for language, text in _BLOCK.findall(PAGE.read_text()):
        if text == loop_block():
            continue  # tests/e2e/test_tinker.py runs it, beside a trainer
        if "/schedule" in text:
            cancel_runs(client)  # an adapter has one at a time by its schedule
        code = text
        for said, is_here in there.items():
            code = code.replace(said, is_here)
        shell = ["bash", "-euo", "pipefail", "-c", SHELL + code]
        argv = [sys.executable, "-c", PYTHON + code] if language == "python" else shell
        done = subprocess.run(
            argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        printed.append([json.loads(line) for line in done.stdout.splitlines() if line])
        env["ID"] = next((each["id"] for each in printed[-1] if "hyperparameters" in each), "")
    uploaded, grown, pulls, validated, rewarded, run, schedule = printed
    assert uploaded[0]["name"] == grown[0]["name"] == "page"
    assert len(pulls) == 3
    assert validated[0]["hyperparameters"]["validation_share"] == 0.1
    assert rewarded[1]["hyperparameters"]["grader"]["type"] == "multi"
    assert [each["status"] for each in run] == ["queued", "queued", "cancelled"]
    assert schedule[0]["window"] == "22:00-06:00"
