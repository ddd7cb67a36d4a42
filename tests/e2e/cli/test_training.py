"""Datasets, runs and schedules. tests/e2e/cli/test_docs.py trains one to its end."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

from tests.cli.runner import Cli
from tests.e2e.cli.conftest import Files
from tests.e2e.system import System, until


def test_a_dataset_arrives_whole(cli: Cli, files: Files) -> None:
    chats = files.chats("lines.jsonl", rows=2000)
    dataset = cli.json("datasets", "upload", str(chats))
    assert dataset["name"] == "lines" and dataset["num_rows"] == 2000
    assert dataset["sha256"] == hashlib.sha256(chats.read_bytes()).hexdigest()
    assert cli.json("datasets", "get", "lines") == dataset


def test_a_dataset_that_is_none_names_its_lines(cli: Cli, files: Files) -> None:
    chats = files.chats("bad.jsonl")
    chats.write_text(chats.read_text() + "{not json}\n")
    done = cli.run("datasets", "upload", str(chats))
    assert done.code == 1 and "5" in done.err and done.out == ""
    assert cli.run("datasets", "get", "bad").code == 1


def test_a_dataset_that_cannot_be_read(cli: Cli, tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "is not a file")):
        done = cli.run("datasets", "upload", str(path))
        assert done.code == 1 and said in done.err and "Traceback" not in done.err


def test_a_run_that_is_cancelled_fails_those_who_watch_it(
    system: System, cli: Cli, files: Files
) -> None:
    """There is no trainer: it waits until it is cancelled."""
    adapter = system.tenants["acme"].adapter
    cli.json("datasets", "upload", str(files.chats()), "--name=waiting")
    done = cli.run("runs", "start", adapter, "waiting", "--set", "rank=8", "--output=id")
    run_id = done.out.strip()
    run = cli.json("runs", "get", run_id)
    assert run["hyperparameters"]["rank"] == 8 and run["status"] == "queued"
    assert run_id in {each["id"] for each in cli.json("runs", "list", "--adapter", adapter)["data"]}
    watching, leaving = (cli.start("runs", "watch", run_id) for _ in range(2))
    for process in (watching, leaving):
        assert process.stderr is not None
        assert process.stderr.readline() == f"{run_id} is queued\n"
    leaving.send_signal(signal.SIGINT)
    _, said = leaving.communicate(timeout=60)
    assert leaving.returncode == 130 and "the run continues" in said
    assert cli.run("runs", "cancel", run_id).code == 0

    def is_over() -> bool:
        return watching.poll() is not None

    until(is_over, "the end of watching", timeout_s=60)
    shown, said = watching.communicate()
    assert watching.returncode == 1 and "The run was cancelled" in said and "cancelled" in shown
    assert cli.run("runs", "watch", run_id).code == 1


def test_a_run_that_cannot_be(system: System, cli: Cli) -> None:
    adapter = system.tenants["acme"].adapter
    done = cli.run("runs", "start", adapter, "nowhere")
    assert done.code == 1 and "dataset" in done.err
    done = cli.run("runs", "start", adapter, "nowhere", "--set", "rank")
    assert done.code == 2 and "NAME=VALUE" in done.err
    assert cli.run("runs", "get", "no-id").code == 1
    assert cli.run("runs", "watch", "../tenant").code == 1


def test_a_schedule_is_set_shown_and_deleted(system: System, cli: Cli, files: Files) -> None:
    adapter = system.tenants["acme"].adapter
    cli.json("datasets", "upload", str(files.chats()), "--name=nightly")
    options = ("--dataset=nightly", "--cron=30 2 * * *", "--timezone=Europe/Berlin")
    rules = ("--rule=window=22:00-06:00", "--rule=grace_s=600")
    made = cli.json("schedules", "set", adapter, *options, *rules, "--set=rank=4", "--paused")
    assert (made["window"], made["grace_s"], made["misfire"]) == ("22:00-06:00", 600, "run_once")
    assert cli.json("schedules", "history", adapter)["data"] == []
    assert made["is_paused"] and made["hyperparameters"] == {"rank": 4}
    assert cli.json("schedules", "get", adapter) == made
    assert cli.json("schedules", "delete", adapter)["deleted"] is True
    assert cli.run("schedules", "get", adapter).code == 1
    done = cli.run("schedules", "set", adapter, "--dataset=nightly", "--cron=never")
    assert done.code == 1 and "cron" in done.err


def test_a_large_dataset_goes_up_in_parts_and_grows(cli: Cli, files: Files) -> None:
    large, more = files.chats("large.jsonl"), files.chats("more.jsonl", rows=3)
    large.write_text(large.read_text().replace("36", "word " * 1700 * 100) * 12)
    assert large.stat().st_size > 33 << 20
    made = cli.json("datasets", "upload", str(large))
    assert (made["num_rows"], made["num_bytes"]) == (48, large.stat().st_size)
    assert made["sha256"] == hashlib.sha256(large.read_bytes()).hexdigest()
    grown = cli.json("datasets", "upload", str(more), "--name=large", "--append")
    assert (grown["version"], grown["num_rows"]) == (2, 51)
    kinds = [each["kind"] for each in cli.json("datasets", "versions", "large")["data"]]
    assert kinds == ["append", "upload"]
    assert cli.json("datasets", "restore", "large", "1")["num_rows"] == 48
    assert "no source" in cli.run("datasets", "pull", "large").err
