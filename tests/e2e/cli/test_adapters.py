"""Adapters from a folder to an answer, and every way in which that goes wrong."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from demo.seed import manage
from tests.cli.runner import Cli
from tests.e2e.adapters import lora_config
from tests.e2e.cli.conftest import Files
from tests.e2e.system import System, until
from tests.receiver import answer, receiving

BASES = "__import__('controlplane.adapters.models').adapters.models.BaseModel.objects"


def test_an_uploaded_folder_answers(system: System, cli: Cli, files: Files) -> None:
    version = cli.json("adapters", "upload", str(files.adapter("letters")), "--wait")
    assert (version["model"], version["status"]) == ("letters@1", "ready")
    assert len(version["digest"]) == 64
    done = cli.run("adapters", "upload", str(files.adapter("other")), "--name=letters", "--wait")
    assert done.code == 0 and "letters@2" in done.out and done.err == "", "no bars, no noise"
    listed = cli.json("adapters", "versions", "letters")["data"]
    assert [each["number"] for each in listed] == [2, 1]
    assert cli.json("adapters", "get", "letters")["live_version"] == 1  # the second one waits
    answer = system.client().completions.create(model="letters@1", prompt="Dear", max_tokens=2)
    assert answer.usage is not None and answer.usage.completion_tokens == 2


def test_a_terminal_sees_how_far_it_is(cli: Cli, files: Files) -> None:
    folder = str(files.adapter("drawn"))
    code, shown = cli.run_in_terminal("adapters", "upload", folder, "--wait")
    assert code == 0, shown
    assert "adapter_model.safetensors" in shown and "KiB" in shown and "ready" in shown, shown


def test_a_rejected_version_fails_with_its_reasons(cli: Cli, files: Files) -> None:
    folder = files.adapter("misfit")
    config = lora_config(rank=4, modules_to_save=["lm_head"])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    done = cli.run("adapters", "upload", str(folder), "--wait")
    assert done.code == 1
    assert "misfit@1 was rejected: modules_to_save:" in done.err
    assert "modules_to_save" in cli.run("adapters", "get", "misfit", "--version=1").out


def test_a_base_of_another_name_is_accepted_for_who_says_so(
    system: System, cli: Cli, files: Files
) -> None:
    folder = files.adapter("copied")
    config = lora_config(rank=4, base_model_name_or_path="lab/our-copy-7b")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    set_names = f"{BASES}.filter(name={system.base_model!r}).update(known_names=%s)"
    read_names = f"print({BASES}.get(name={system.base_model!r}).known_names)"
    before = manage(system.env, "shell", "--no-imports", "-c", read_names).strip()
    manage(system.env, "shell", "--no-imports", "-c", set_names % ["org/base-7b"])
    try:
        done = cli.run("adapters", "upload", str(folder), "--wait")
        assert done.code == 1
        assert "base_model_name_or_path: it is" in done.err
        assert "--accept-base-mismatch" in done.err
        accept = "--accept-base-mismatch"
        version = cli.json("adapters", "upload", str(folder), accept, "--wait")
        assert (version["model"], version["status"]) == ("copied@2", "ready")
    finally:
        manage(system.env, "shell", "--no-imports", "-c", set_names % before)


def test_an_adapter_is_imported_from_addresses(cli: Cli, files: Files) -> None:
    folder = files.adapter("fetched")

    def send(handler: Any) -> None:
        answer(200, (folder / handler.path[1:]).read_bytes())(handler)

    with receiving() as receiver:
        receiver.behave = send
        url = f"http://127.0.0.1:{receiver.port}"
        urls = ("--urls", f"{url}/adapter_config.json", f"{url}/adapter_model.safetensors")
        version = cli.json("adapters", "import", "fetched", *urls, "--wait")
        assert (version["status"], version["source"]) == ("ready", "import")
        (folder / "adapter_model.safetensors").unlink()
        receiver.behave = answer(404)
        done = cli.run("adapters", "import", "fetched", *urls, "--wait")
    assert done.code == 1 and "no such file" in done.err and "404" in done.err
    done = cli.run("adapters", "import", "x", "--repository=a/b", "--token-env=NO_SUCH")
    assert done.code == 1 and "NO_SUCH" in done.err


def make_empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def make_pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def make_model(folder: Path) -> None:
    (folder / "adapter_config.json").rename(folder / "config.json")


def make_other_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 4}')


def make_unreadable(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()


WRONG = {
    make_empty: "no adapter_config.json and no adapter_model.safetensors in it",
    make_pickled: "safe_serialization=True",
    make_model: "looks like a whole model",
    make_other_json: "not a PEFT configuration",
    make_unreadable: "is not a file",
}


@pytest.mark.parametrize(
    ("spoil", "said"), WRONG.items(), ids=lambda it: getattr(it, "__name__", "")
)
def test_what_is_no_adapter_folder(cli: Cli, files: Files, spoil: object, said: str) -> None:
    folder = files.adapter("wrong")
    assert callable(spoil)
    spoil(folder)
    done = cli.run("adapters", "upload", str(folder))
    assert done.code == 1 and said in done.err and "Traceback" not in done.err
    assert cli.run("adapters", "get", "wrong").code == 1, "nothing was begun"


def test_an_interrupted_wait_and_a_file_that_changed_meanwhile(
    system: System, cli: Cli, files: Files
) -> None:
    """Nobody checks versions while both uploads wait."""
    celery = system.platform.celery
    celery.ask_to_stop()
    celery.stop()
    left, changed = files.adapter("left"), files.adapter("changed")
    waiting = [cli.start("adapters", "upload", str(each), "--wait") for each in (left, changed)]
    for name in ("left", "changed"):

        def is_complete(name: str = name) -> bool:
            done = cli.run("adapters", "get", name, "--version=1", "--output=json")
            return done.code == 0 and done.json["status"] == "uploaded"

        until(is_complete, f"the upload of {name}", timeout_s=60)
    (changed / "adapter_config.json").write_text(json.dumps(lora_config(rank=4, lora_alpha=99)))
    waiting[0].send_signal(signal.SIGINT)
    _, said = waiting[0].communicate(timeout=60)
    assert waiting[0].returncode == 130
    assert "the upload is complete" in said and "lorikeet adapters get left --version 1" in said
    celery.start()
    _, said = waiting[1].communicate(timeout=120)
    assert waiting[1].returncode == 1 and "the digests differ" in said

    def is_ready() -> bool:
        return bool(cli.json("adapters", "get", "left", "--version=1")["status"] == "ready")

    until(is_ready, "the check of what was left", timeout_s=60)
