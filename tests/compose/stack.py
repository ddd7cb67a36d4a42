"""One installation by the real docker-compose.yml, and what a client and an operator do with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from demo.ports import choose_ports
from tests.compose.docker import compose_command, docker, environment, inspect, run
from tests.compose.standins import ROOT

START_TIMEOUT_S = 600.0
#: The base model of the profile `cpu`.
BASE = "smollm2-135m-instruct"


class Stack:
    """A Compose project of its own name, with its .env in `folder`; `up` and `down` as typed."""

    def __init__(self, folder: Path, *, variables: Mapping[str, str], project: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        web_port, s3_port, prometheus_port = choose_ports(3)
        self.project = project
        self.base_url = f"http://127.0.0.1:{web_port}"
        self.s3_url = f"http://127.0.0.1:{s3_port}"
        self.prometheus_url = f"http://127.0.0.1:{prometheus_port}"
        self.variables = {
            "LORIKEET_BASE_URL": self.base_url,
            "S3_PUBLIC_ENDPOINT_URL": self.s3_url,
            "LORIKEET_BASE_MODEL_FOLDER": "",
            "COMPOSE_PROFILES": "gpu",  # as in the example; --profile says otherwise
            "LORIKEET_PORT": str(web_port),
            "S3_PORT": str(s3_port),
            "PROMETHEUS_PORT": str(prometheus_port),
            **variables,
        }
        self._env_file = folder / "env"
        self.log = folder / "log"
        self.log.unlink(missing_ok=True)
        self._command = compose_command()

    def compose(
        self, *argv: str, timeout_s: float = 600, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker compose --profile cpu …` with .env as it is, and these variables beside."""
        lines = [f"{name}={value}\n" for name, value in (self.variables | variables).items()]
        self._env_file.write_text("".join(lines))
        return run(
            [
                *(*self._command, "--project-name", self.project, "--profile", "cpu"),
                *("--project-directory", str(ROOT), "--file", str(ROOT / "docker-compose.yml")),
                *("--env-file", str(self._env_file), *argv),
            ],
            timeout_s=timeout_s,
            check=check,
        )

    def manage(self, *argv: str, stdin: str = "") -> dict[str, Any]:
        """Run one of manage.py's commands in the web container -> the last line, as JSON."""
        done = subprocess.run(
            ["docker", "exec", "-i", self.container("web"), "python", "manage.py", *argv],
            env=environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer

    def containers(self) -> dict[str, str]:
        """Service -> id of its container, running or not."""
        label = f"label=com.docker.compose.project={self.project}"
        form = '{{.ID}} {{.Label "com.docker.compose.service"}}'
        lines = docker("ps", "--all", "--filter", label, "--format", form).splitlines()
        return {service: number for number, service in map(str.split, lines)}

    def container(self, service: str) -> str:
        return self.containers()[service]

    def state(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = inspect(self.container(service))["State"]
        return found

    def is_well(self, service: str) -> bool:
        state = self.state(service)
        if "Health" in state:
            return bool(state["Health"]["Status"] == "healthy" and state["Running"])
        return bool(state["Status"] == "exited" and state["ExitCode"] == 0)

    def logs(self, *services: str) -> str:
        return self.compose("logs", "--no-color", *services).stdout

    def down(self, *argv: str, check: bool = True) -> None:
        """End everything; what it logged until then is kept in the file `log`."""
        with self.log.open("a") as log:
            log.write(self.compose("logs", "--no-color", check=False).stdout)
        self.compose("down", "--timeout", "30", *argv, check=check)

    def wait_until_well(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once every service is healthy, or done if it ends by itself."""

        def is_well() -> bool:
            return all(map(self.is_well, self.containers()))

        wait_until(is_well, timeout_s=timeout_s, what=self.describe)

    def describe(self) -> str:
        states = {service: self.state(service) for service in sorted(self.containers())}
        lines = [
            f"{name}: {s['Status']} {s['ExitCode']} {s.get('Health', {}).get('Status', '')}"
            for name, s in states.items()
        ]
        return "\n".join(lines) + "\n" + self.logs()[-6000:]

    def kill(self, service: str) -> None:
        """SIGKILL its main process, as the kernel does when memory ends."""
        pid = self.state(service)["Pid"]
        if os.geteuid() == 0 and Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
        else:  # Docker takes this for an end that was asked for, and leaves the container
            docker("kill", "--signal", "KILL", self.container(service))
            docker("start", self.container(service))

    def volumes(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.project}"
        return docker("volume", "ls", "--quiet", "--filter", label).split()


def wait_until(
    is_so: Callable[[], bool], *, timeout_s: float, what: Callable[[], str] = str
) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up_at, f"not within {timeout_s:.0f} s\n{what()}"
        time.sleep(1.0)


class Client:
    """A tenant's program: the public API with a key."""

    def __init__(self, stack: Stack, key: str) -> None:
        self._s3_url = stack.s3_url
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=stack.base_url, headers=headers, timeout=120)

    def call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        answer = self._http.request(method, path, **arguments)
        assert answer.status_code < 300, (path, answer.status_code, answer.text[:2000])
        body: dict[str, Any] = answer.json()
        return body

    def chat(self, model: str, text: str, **fields: Any) -> str:
        content: str = self.answer(model, text, **fields).json()["choices"][0]["message"]["content"]
        return content

    def answer(self, model: str, text: str, **fields: Any) -> httpx.Response:
        """The answer to a chat, with its headers."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        answer = self._http.post("/v1/chat/completions", json={"max_tokens": 24, **body})
        assert answer.status_code == 200, answer.text[:2000]
        return answer

    def upload(self, adapter: str, folder: Path) -> str:
        """Upload a version through presigned URLs -> its address; its check has begun."""
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        path = f"/api/v1/adapters/{adapter}/versions"
        made = self.call("POST", path, json={"base_model": BASE, "files": files})
        for file, where in made["uploads"].items():
            assert where["url"].startswith(self._s3_url)
            content = (folder / file).read_bytes()
            put = httpx.put(where["url"], content=content, headers=where["headers"])
            assert put.status_code == 200, put.text
        path = f"{path}/{made['number']}"
        self.call("POST", f"{path}/complete")
        return path

    def decided(self, version: str, timeout_s: float = 240) -> dict[str, Any]:
        """The version at this address, once it is ready or rejected."""

        def is_decided() -> bool:
            return self.call("GET", version)["status"] in ("ready", "rejected")

        wait_until(is_decided, timeout_s=timeout_s, what=lambda: str(self.call("GET", version)))
        return self.call("GET", version)

    def stream(self, model: str, text: str) -> list[str]:
        """The pieces of a streamed answer, as they came."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 24,
            "stream": True,
        }
        return list(self._pieces(body))

    def _pieces(self, body: dict[str, Any]) -> Iterator[str]:
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    yield choice["delta"].get("content") or ""


@contextlib.contextmanager
def other_stack(stack: Stack, folder: Path, name: str) -> Iterator[Stack]:
    """A second, empty installation of the same images; nothing is left of it."""
    other = Stack(folder, variables={}, project=f"{stack.project}-{name}")
    try:
        yield other
    finally:
        other.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


def start_run(client: Client, adapter: str, *, max_steps: int) -> str:
    """Train on rows of the demo's -> the run's address."""
    rows = (ROOT / "demo" / "data" / "acme.jsonl").read_bytes().splitlines()[:8]
    client.call(
        *("POST", "/api/v1/datasets"),
        params={"name": "invoices"},
        content=b"\n".join(rows) + b"\n",
        headers={"Content-Type": "application/jsonl"},
    )
    hyper = {"rank": 4, "max_steps": max_steps, "batch_size": 2, "max_length": 512}
    body = {"adapter": adapter, "dataset": "invoices", "hyperparameters": hyper}
    return f"/api/v1/training-runs/{client.call('POST', '/api/v1/training-runs', json=body)['id']}"
