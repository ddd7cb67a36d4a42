"""The request log and usage, also while requests come in and the gateway restarts."""

from __future__ import annotations

import json
import queue
import subprocess
import threading

from tests.cli.runner import Cli
from tests.e2e.system import System, until


def ask(system: System, **options: object) -> str:
    """-> the request's id."""
    model = system.tenants["acme"].adapter
    answer = system.client().completions.with_raw_response.create(
        model=model, prompt="Dear", max_tokens=2, **options
    )
    request_id: str = answer.headers["x-request-id"]
    system.usage_soon(request_id)
    return request_id


def test_the_newest_requests_are_shown_last(system: System, cli: Cli) -> None:
    first, second = ask(system), ask(system)
    done = cli.run("logs", "--limit=2")
    assert done.code == 0
    ids = [line.split()[0] for line in done.out.splitlines()[1:]]
    assert ids == [first, second]
    assert [row["id"] for row in cli.json("logs", "--limit=2")["data"]] == [second, first]
    assert cli.run("logs", "--limit=1", "--output=id").out == f"{second}\n"


def test_requests_are_filtered(system: System, cli: Cli) -> None:
    request_id = ask(system)
    found = cli.json("logs", "--finish-reason=length", "--since=1h", "--limit=1")
    assert [row["id"] for row in found["data"]] == [request_id]
    assert cli.json("logs", "--model=nobody")["data"] == []
    done = cli.run("logs", "--since=yesterday")
    assert done.code == 2 and "90d" in done.err
    done = cli.run("logs", "--since=2026-13-01T00:00:00Z")
    assert done.code == 1 and "accepted_after" in done.err


def test_usage_adds_up(system: System, cli: Cli) -> None:
    ask(system)
    model = system.tenants["acme"].adapter
    rows = {row["model"]: row for row in cli.json("usage")["data"]}
    assert rows[model]["completion_tokens"] >= 2
    assert model in cli.run("usage").out


def lines_of(process: subprocess.Popen[str]) -> queue.Queue[str]:
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def test_following_shows_each_request_once_and_lives_through_a_restart(
    system: System, cli: Cli
) -> None:
    before = ask(system)
    process = cli.start("logs", "--follow", "--limit=1", "--output=json")
    try:
        lines = lines_of(process)
        assert json.loads(lines.get(timeout=60))["id"] == before
        asked = [ask(system)]
        assert json.loads(lines.get(timeout=60))["id"] == asked[0]
        system.platform.web.ask_to_stop()
        system.platform.web.stop()
        system.platform.web.start()
        system.platform.wait_until_ready()
        asked = [ask(system), ask(system)]
        assert {json.loads(lines.get(timeout=60))["id"] for _ in asked} == set(asked)
        assert lines.empty()
    finally:
        process.terminate()
        process.communicate()


def test_following_ends_by_itself_only_when_told(system: System, cli: Cli) -> None:
    process = cli.start("logs", "--follow", "--limit=1")
    until(lambda: process.poll() is None, "it runs")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ID")
    process.send_signal(2)
    assert process.wait(30) == 0


def test_following_without_access_prints_no_table(cli: Cli) -> None:
    """Its title comes after the first page, when all modules are there: see `_follow`."""
    done = cli.run("logs", "--follow", LORIKEET_API_KEY="lk_live_none")
    assert done.code != 0 and done.err.startswith("lorikeet: ")
    assert done.out == ""
