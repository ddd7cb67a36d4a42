"""What the logs of the whole platform say of one request, and what they never say."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from demo.errors import StepFailed
from demo.platform import mail_folder
from demo.seed import ROOT
from tests.e2e.adapters import lora_config, lora_tensors, write_adapter
from tests.e2e.system import System, until

#: As in "never logged" of docs/logs.md.
PROMPT, ANSWER, SCHEMA = "mark-prompt-3f9c", "mark-answer-77b1", "mark_schema_5ad0"
ADAPTER, ROW, TRACE = "mark-adapter-c41e", "mark-row-9e02", "mark.trace-1d8a"
FORM = {
    "type": "object",
    "properties": {SCHEMA: {"type": "string", "enum": [ANSWER]}},
    "required": [SCHEMA],
    "additionalProperties": False,
}


def logs_folder(system: System) -> Path:
    return system.platform.web.log.parent


def chat(system: System, **fields: Any) -> httpx.Response:
    tenant = system.tenants["acme"]
    body = {
        "model": tenant.adapter,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 40,
        **fields,
    }
    headers = {"Authorization": f"Bearer {tenant.api_key}", "X-Request-Id": TRACE}
    url = f"{system.base_url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=120)


def schema(form: dict[str, Any]) -> dict[str, Any]:
    named = {"name": SCHEMA, "strict": True, "schema": form}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def say_all(system: System) -> list[str]:
    """Say each marker in every place that takes it. -> the request ids."""
    answered = chat(system, **schema(FORM))
    assert ANSWER in answered.text, answered.text
    streamed = chat(system, stream=True, **schema(FORM))
    assert streamed.is_success, streamed.text
    refused = [
        chat(system, **schema({**FORM, "not": {SCHEMA: 1}})),
        chat(system, messages=[{"role": PROMPT, "content": PROMPT}]),
        chat(system, model=PROMPT),
        chat(system, max_tokens=10**9),
    ]
    assert {answer.status_code for answer in refused} <= {400, 404}
    return [answer.headers["x-request-id"] for answer in (answered, streamed, *refused)]


def show_the_key(system: System) -> None:
    """Send a key wherever clients put it by mistake."""
    key = system.tenants["acme"].api_key
    header = {"Authorization": f"Bearer {key}"}
    for path in (f"/v1/models?api_key={key}", f"/v1/{key}", f"/console/{key}?token={key}"):
        httpx.get(system.base_url + path, timeout=30)
    httpx.get(f"{system.base_url}/v1/models", headers={**header, "X-Request-Id": key}, timeout=30)
    httpx.get(f"{system.base_url}/v1/models", headers={"Authorization": f"Basic {key}"}, timeout=30)


def upload(system: System, folder: Path) -> None:
    """Upload an adapter that the checks refuse, with markers in its names, and a dataset."""
    tensors = lora_tensors(system.base_config, seed=7)
    tensors[f"base_model.{ADAPTER}.lora_A.weight"] = next(iter(tensors.values()))
    made = write_adapter(folder, tensors, lora_config(revision=ADAPTER))
    with contextlib.closing(system.management()) as client, pytest.raises(StepFailed):
        client.upload_adapter("marked", made, base_model=system.base_model)
    rows = [{"messages": [{"role": who, "content": ROW} for who in ("user", "assistant")]}] * 10
    header = {"Authorization": f"Bearer {system.tenants['acme'].api_key}"}
    url = f"{system.base_url}/api/v1/datasets?name=marked"
    for broken in ("", f'{{"messages": "{ROW}"}}\n'):
        content = "".join(json.dumps(row) + "\n" for row in rows) + broken
        answer = httpx.post(url, content=content.encode(), headers=header, timeout=60)
        assert answer.is_error == bool(broken), answer.text


def reset_the_password(system: System) -> str:
    """Ask for a new password and open the mail's link. -> the link's secret part."""
    address = f"{system.base_url}/console/account/password/reset/"
    folder = mail_folder(logs_folder(system).parent)
    before = set(folder.glob("*"))
    with httpx.Client(timeout=30, follow_redirects=True) as browser:
        browser.get(address)
        form = {"email": system.tenants["acme"].email}
        form["csrfmiddlewaretoken"] = browser.cookies["csrftoken"]
        assert browser.post(address, data=form, headers={"Referer": address}).is_success
        [mail] = until(lambda: set(folder.glob("*")) - before, "a mail")
        [secret] = re.findall(r"/password/reset/key/([^/\s]+)", mail.read_text())
        assert browser.get(f"{address}key/{secret}/").is_success
    return secret


def test_no_log_has_what_people_said_or_any_secret(system: System, tmp_path: Path) -> None:
    """At DEBUG, in the logs of all our processes and of the servers."""
    ids = say_all(system)
    show_the_key(system)
    upload(system, tmp_path / "made")
    token = reset_the_password(system)
    text = ""
    until(lambda: ids[0] in (logs_folder(system) / "worker.log").read_text(), "its lines")
    logs = sorted(logs_folder(system).glob("*.log"))
    servers = sorted((logs_folder(system).parents[1] / "logs").glob("*.log"))
    assert {log.stem for log in logs} >= {"web", "worker", "celery", "accountant"}
    assert {log.stem for log in servers} >= {"postgres", "redis", "seaweedfs"}
    for log in [*logs, *servers]:
        text += log.read_text(errors="replace")
    assert '"level": "debug"' in text and all(request_id in text for request_id in ids)
    assert "adapter version rejected" in text
    tenants = system.tenants.values()
    never = {
        *(PROMPT, ANSWER, SCHEMA, ADAPTER, ROW, token, token.partition("-")[2]),
        *(tenant.api_key for tenant in tenants),
        *(tenant.api_key[-20:] for tenant in tenants),
        *(tenant.password for tenant in tenants),
        *(system.env[name] for name in ("LORIKEET_SECRET_KEY", "LORIKEET_KEY_PEPPER")),
        system.env["S3_SECRET_ACCESS_KEY"],
        *(urlsplit(system.env[name]).password for name in ("DATABASE_URL", "REDIS_URL")),
    }
    assert [word for word in never if not word] == []
    assert [word for word in never if word and word in text] == []
    assert re.findall(r"X-Amz-Signature=[0-9a-f]+", text) == []


def test_every_line_of_ours_is_json(system: System) -> None:
    chat(system)
    for name in ("web", "worker", "accountant"):
        written = (logs_folder(system) / f"{name}.log").read_text()
        lines = written[: written.rfind("\n")].splitlines()
        assert [line for line in lines if not line.startswith("{")] == [], name
        for line in map(json.loads, lines):
            assert {"timestamp", "level", "logger", "event"} <= line.keys()


def test_the_commands_of_the_documentation_follow_a_request(system: System) -> None:
    answer = chat(system)
    request_id = answer.headers["x-request-id"]
    assert answer.headers["x-client-request-id"] == TRACE
    worker = logs_folder(system) / "worker.log"
    until(lambda: f'"request ended", "request_id": "{request_id}"' in worker.read_text(), "its end")
    document = (ROOT / "docs" / "logs.md").read_text()
    section = document.partition("## Following one request")[2].partition("\n## ")[0]
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL)).split("\n\n")
    env = {"LOGS": str(logs_folder(system)), "ID": request_id, "TRACE": TRACE}
    printed = [
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            env={**system.env, **env},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command in commands
    ]
    assert len(printed) >= 3
    whole, by_trace, slow = printed[:3]
    assert {tuple(line.split("\t")[1:3]) for line in whole.splitlines()} == {
        ("worker.engine_process.process", "request begins"),
        ("worker.serving.requests", "request ended"),
        ("controlplane.requests", "request"),
    }
    assert request_id in by_trace.split()
    assert request_id in slow


def test_the_official_client_finds_its_id(system: System) -> None:
    client: openai.OpenAI = system.client()
    raw = client.chat.completions.with_raw_response.create(
        model=system.base_model,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=1,
        extra_headers={"X-Client-Request-Id": TRACE},
    )
    assert raw.headers["x-client-request-id"] == TRACE
    assert raw.headers["x-request-id"] == raw.parse()._request_id
