"""Releases in containers: checks in the sealed child, probes, promotion, canaries, webhooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.compose.docker import docker, host_address
from tests.compose.stack import BASE, Client, Stack, wait_until
from tests.e2e.adapters import lora_tensors, write_adapter
from tests.receiver import Received, Receiver

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

OWNER, PASSWORD = "owner@globex.example", "a long passphrase of globex"
#: Users of whom each is sent to the primary or to the canary, at 50%.
USERS = 40
#: The seal as a container of the platform has it: nothing that the child tries may succeed.
SEAL = """
import json, os, sys
from contract.process.sealed_process import serve

def tried(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0

def work(described, files):
    import socket
    return {
        "file": tried(lambda: os.open("/etc/passwd", os.O_RDONLY)),
        "socket": tried(socket.socket),
        "process": tried(os.fork),
        "uid": UID,
    }

import socket
UID = os.getuid()
serve(work)
"""
RUN_SEALED = """
import json, pathlib, sys
sys.path.insert(0, "/app")
from controlplane.infra import sealed_child
folder = pathlib.Path("/tmp/sealed"); folder.mkdir(exist_ok=True)
(folder / "tries.py").write_text(SEAL)
sealed_child._ROOT = f"{folder}:/app"
bounds = sealed_child.Bounds(memory_bytes=64 << 20, cpu_s=5, wall_s=30, answer_bytes=1 << 16)
ended = sealed_child.run_sealed("tries", {}, [], environment={}, bounds=bounds)
print(json.dumps({"walls": ended.walls, **ended.answer}))
"""


@pytest.fixture(scope="module")
def base_config(stack: Stack) -> dict[str, Any]:
    path = f"/model/{BASE}/config.json"
    config: dict[str, Any] = json.loads(docker("exec", stack.container("worker-cpu"), "cat", path))
    return config


@pytest.fixture(scope="module")
def secret(stack: Stack, globex: Client, receiver: Receiver) -> str:
    """The secret of globex's webhook, which its owner made in the console."""
    stack.manage(
        *("member_add", "--tenant", "globex", "--email", OWNER, "--role", "owner"),
        "--password-stdin",
        stdin=PASSWORD + "\n",
    )
    types = [f"version.{what}" for what in ("ready", "rejected", "promoted", "rolled_back")]
    with httpx.Client(base_url=stack.base_url, follow_redirects=True, timeout=60) as browser:
        send(browser, "/console/sign-in", login=OWNER, password=PASSWORD)
        inside = send_webhook(browser, "http://postgres:5432/", types)
        assert inside.status_code == 422  # a neighbour in the containers' network
        made = send_webhook(browser, f"http://{host_address()}:{receiver.port}/globex", types)
    assert made.status_code == 200, made.text[:2000]
    return re.findall(r"whsec_[\w+/=-]+", made.text)[0]


def send_webhook(browser: httpx.Client, url: str, types: list[str]) -> httpx.Response:
    fields: dict[str, Any] = {"url": url, "description": "", "event_types": types}
    return send(browser, "/console/webhooks", to="/console/webhooks/new", **fields)


def send(browser: httpx.Client, page: str, to: str = "", **fields: Any) -> httpx.Response:
    """Open a page and send its form."""
    opened = browser.get(page)
    token = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', opened.text)[0]
    form = {"csrfmiddlewaretoken": token, **fields}
    return browser.post(to or page, data=form, headers={"Referer": str(opened.url)})


def events(receiver: Receiver, secret: str, **wanted: Any) -> Iterator[dict[str, Any]]:
    """The events that have arrived, each with a valid signature, with these fields in `data`."""
    for sent in list(receiver.received):
        event = verified(sent, secret)
        if wanted.items() <= event["data"].items():
            yield event


def verified(sent: Received, secret: str) -> dict[str, Any]:
    webhooks = openai.OpenAI(api_key="x").webhooks
    webhooks.verify_signature(sent.body, sent.headers, secret=secret)
    event: dict[str, Any] = json.loads(sent.body)
    return event


def told(receiver: Receiver, secret: str, *types: str, **wanted: Any) -> None:
    def has_arrived() -> bool:
        arrived = {event["type"] for event in events(receiver, secret, **wanted)}
        return set(types) <= arrived

    wait_until(has_arrived, timeout_s=60, what=lambda: str(receiver.received))


def checks_answered(stack: Stack) -> float:
    """Checks that ended in a sealed child of the service `celery`, as it tells Prometheus."""
    script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
    text = docker("exec", stack.container("celery"), "python", "-c", script)
    found = re.findall(
        r'^lorikeet_adapter_checks_ended_total\{outcome="answered"\} (\S+)', text, re.M
    )
    return float(found[0])


# --- checks and probes


def test_the_seal_holds_in_the_container(stack: Stack) -> None:
    script = f"SEAL = {SEAL!r}\n{RUN_SEALED}"
    said = json.loads(docker("exec", stack.container("celery"), "python", "-c", script))
    assert said.pop("walls") == ["limits", "seccomp"]
    assert said.pop("uid") == 10001  # not root, for whom some limits do not hold
    assert set(said) == {"file", "socket", "process"}
    assert all(said.values()), said


def test_a_good_upload_is_checked_in_the_sealed_child_probed_and_told(
    stack: Stack,
    globex: Client,
    receiver: Receiver,
    secret: str,
    base_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    before = checks_answered(stack)
    folder = write_adapter(tmp_path / "good", lora_tensors(base_config, seed=1))
    path = globex.upload("seasons", folder)
    version = globex.decided(path)
    assert version["status"] == "ready", version
    assert checks_answered(stack) > before
    assert version["probe"]["status"] == "agreed", version["probe"]
    doctor = globex.call("GET", f"{path}/doctor")
    assert doctor["summary"] and doctor["modules"]
    assert globex.answer("seasons", "Hello?").headers["x-lorikeet-version"] == "seasons@1"
    told(receiver, secret, "version.ready", "version.promoted", adapter="seasons", version=1)


def test_a_bad_upload_is_rejected_by_name_and_told(
    stack: Stack,
    globex: Client,
    receiver: Receiver,
    secret: str,
    base_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    before = checks_answered(stack)
    tensors = lora_tensors(base_config, seed=2)
    name = sorted(tensors)[0]
    tensors[name][0, 0] = np.nan
    version = globex.decided(globex.upload("seasons", write_adapter(tmp_path / "nan", tensors)))
    assert version["status"] == "rejected"
    [reason] = version["reasons"]
    assert reason["field"] == name
    assert "NaN or infinity" in reason["message"]
    assert checks_answered(stack) > before
    told(receiver, secret, "version.rejected", adapter="seasons", version=2)
    assert globex.answer("seasons", "Hello?").headers["x-lorikeet-version"] == "seasons@1"


# --- promotion and canaries


def test_a_later_version_waits_is_promoted_and_rolled_back(
    globex: Client,
    receiver: Receiver,
    secret: str,
    base_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path / "better", lora_tensors(base_config, seed=3))
    path = globex.upload("seasons", folder)
    assert globex.decided(path)["status"] == "ready"
    assert globex.answer("seasons@3", "Hello?").headers["x-lorikeet-version"] == "seasons@3"
    assert answering(globex) == "seasons@1"
    globex.call("POST", f"{path}/promote", json={"reason": "better"})
    wait_until(lambda: answering(globex) == "seasons@3", timeout_s=5)
    told(receiver, secret, "version.promoted", version=3, previous_version=1, reason="better")
    globex.call("POST", "/api/v1/adapters/seasons/rollback")
    wait_until(lambda: answering(globex) == "seasons@1", timeout_s=5)
    told(receiver, secret, "version.rolled_back", version=1, previous_version=3)
    causes = [
        row["cause"] for row in globex.call("GET", "/api/v1/adapters/seasons/history")["data"]
    ]
    assert causes == ["rolled_back", "promoted", "first"]


def answering(client: Client) -> str:
    return client.answer("seasons", "Hello?", max_tokens=1).headers["x-lorikeet-version"]


def test_an_alias_answers_with_its_canary_and_goes_back(globex: Client) -> None:
    aliases = "/api/v1/aliases"
    globex.call("POST", aliases, json={"name": "prod", "primary": {"adapter": "seasons"}})
    canary = {"adapter": "seasons", "version": 3}
    body = {"canary": canary, "canary_percent": 50, "if_revision": 1}
    assert globex.call("PATCH", f"{aliases}/prod", json=body)["revision"] == 2
    wait_until(lambda: targets(globex, "user 0")[1] == "2", timeout_s=5)
    found = {f"user {i}": targets(globex, f"user {i}") for i in range(USERS)}
    of_target = {"primary": "seasons@1", "canary": "seasons@3"}
    assert {target for target, _, _ in found.values()} == set(of_target)
    assert all(version == of_target[target] for target, _, version in found.values())
    assert all(targets(globex, user) == found[user] for user in list(found)[:8])  # they stay
    globex.call("POST", f"{aliases}/prod/rollback")
    wait_until(lambda: targets(globex, "user 0")[1] == "3", timeout_s=5)
    assert {targets(globex, user)[2] for user in found} == {"seasons@1"}


def targets(client: Client, user: str) -> tuple[str, str, str]:
    """What answers a user: the target, the alias's revision, the version."""
    headers = client.answer("prod", "Hello?", max_tokens=1, user=user).headers
    names = ("alias-target", "alias-revision", "version")
    target, revision, version = (headers[f"x-lorikeet-{name}"] for name in names)
    return target, revision, version


# --- the inspector dies


def test_an_inspector_that_is_killed_holds_nothing_up(
    stack: Stack, globex: Client, base_config: dict[str, Any], tmp_path: Path
) -> None:
    first, second = (
        write_adapter(tmp_path / str(seed), lora_tensors(base_config, seed=seed)) for seed in (4, 5)
    )
    begun = stack.logs("inspector-cpu").count("inspection begins")
    interrupted = globex.upload("seasons", first)
    wait_until(lambda: stack.logs("inspector-cpu").count("inspection begins") > begun, timeout_s=60)
    before = stack.state("inspector-cpu")["StartedAt"]
    stack.kill("inspector-cpu")
    assert globex.call("GET", interrupted)["status"] == "validating"
    wait_until(
        lambda: (
            stack.state("inspector-cpu")["StartedAt"] != before and stack.is_well("inspector-cpu")
        ),
        timeout_s=180,
        what=stack.describe,
    )
    assert globex.decided(globex.upload("seasons", second))["probe"]["status"] == "agreed"
    # Its probe comes later: whoever had begun it has a lease of minutes.
    assert globex.decided(interrupted)["status"] == "ready"
