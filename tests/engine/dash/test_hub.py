"""Bases and adapters by their id on the Hub: over its API, from its cache, and without either."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import AdapterUnavailable, DashConfig, DashEngine, UnsupportedModel
from engine.dash import hub as hub_module
from engine.dash.hub import ADAPTER_FILES, HubId, NotOnHub, fetch, find_id
from tests.engine.conftest import Oracle, prompt
from tests.engine.dash.hub_server import HubServer

constants = pytest.importorskip("huggingface_hub").constants

ROOT = Path(__file__).parents[3]
SMALL = DashConfig(adapter_vram_pool="2MB", kv_pool="2MB")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub, an empty cache, and a folder to work in that has nothing."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with HubServer() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        yield server


def test_a_base_and_its_adapters(
    hub: HubServer,
    tiny_model: Path,
    adapters: dict[str, Path],
    oracle: Oracle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(tiny_model, tmp_path / "base")
    (tmp_path / "base" / "original").mkdir()
    (tmp_path / "base" / "original" / "model.safetensors").write_bytes(b"not wanted")
    (tmp_path / "base" / "consolidated.safetensors").write_bytes(b"not wanted")
    hub.publish("org/base", tmp_path / "base")
    first = hub.publish("org/adapter", adapters["all-4"])
    hub.publish("org/adapter", adapters["qv-16"])
    hub.publish("org/adapter", adapters["ko-1"], branch="dev")
    with DashEngine("org/base", SMALL) as engine:
        assert engine.tokenizer is not None
        engine.register_adapter("newest", "org/adapter")
        engine.register_adapter("pinned", f"org/adapter@{first}")
        engine.register_adapter("branch", "org/adapter", revision="dev")
        got = engine.generate(
            [prompt(0, 8)] * 4, ["newest", "pinned", "branch", None], max_new_tokens=8
        )
    for completion, name in zip(got, ["qv-16", "all-4", "ko-1", None], strict=True):
        wanted = oracle.generate(prompt(0, 8), 8, name)
        assert completion.token_ids == wanted[: len(completion.token_ids)] != []
    assert not [path for path in hub.asked if "original" in path or "consolidated" in path]
    hub.close()
    monkeypatch.setattr(hub, "close", lambda: None)
    with DashEngine("org/base", SMALL) as engine:  # the cache has it
        engine.register_adapter("newest", "org/adapter")
        (again,) = engine.generate([prompt(0, 8)], "newest", max_new_tokens=8)
    assert again.token_ids == got[0].token_ids


def test_a_commit_in_the_cache_is_not_asked_for_again(
    hub: HubServer, adapters: dict[str, Path]
) -> None:
    commit = hub.publish("org/adapter", adapters["all-4"])
    wanted = HubId(repo="org/adapter", revision=commit)
    folder = fetch(wanted, ADAPTER_FILES)
    assert folder.name == commit
    hub.asked.clear()
    assert fetch(wanted, ADAPTER_FILES) == folder
    assert hub.asked == []
    (folder / ADAPTER_FILES[1]).unlink()  # a download that was cut off
    assert fetch(wanted, ADAPTER_FILES) == folder
    assert (folder / ADAPTER_FILES[1]).is_file()


def test_what_a_name_meant_stays_when_the_branch_moves_on(
    hub: HubServer, tiny_model: Path, adapters: dict[str, Path], oracle: Oracle
) -> None:
    hub.publish("org/adapter", adapters["all-4"])
    with DashEngine(tiny_model, SMALL) as engine:
        engine.register_adapter("mine", "org/adapter")
        engine.generate([prompt(0, 8)], "mine", max_new_tokens=1)
        hub.publish("org/adapter", adapters["qv-16"])
        (old,) = engine.generate([prompt(0, 8)], "mine", max_new_tokens=8)
        engine.register_adapter("mine", "org/adapter")
        (new,) = engine.generate([prompt(0, 8)], "mine", max_new_tokens=8)
    for completion, name in ((old, "all-4"), (new, "qv-16")):
        wanted = oracle.generate(prompt(0, 8), 8, name)
        assert completion.token_ids == wanted[: len(completion.token_ids)]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("org/nothing", "not a folder here.*no such public repository.*HF_TOKEN"),
        ("org/adapter@nowhere", "no revision 'nowhere'"),
        ("gated/adapter", "gated.*HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses(
    hub: HubServer, tiny_model: Path, adapters: dict[str, Path], source: str, words: str
) -> None:
    hub.publish("org/adapter", adapters["all-4"])
    with DashEngine(tiny_model, SMALL) as engine:
        engine.register_adapter("mine", source)
        (failed,) = engine.generate([prompt(0, 8)], "mine")
        assert isinstance(failed.error, AdapterUnavailable)
        with pytest.raises(NotOnHub, match=words):
            raise NotOnHub(str(failed.error))
        assert engine.stats().adapters["mine"].startswith("failed: ")
    with pytest.raises(UnsupportedModel, match=words):
        DashEngine(source)


def test_a_hub_that_is_away_or_silent_is_given_up_soon(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_SILENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 9):
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            began = time.monotonic()
            with pytest.raises(NotOnHub, match=r"not a folder here.*cannot be reached.*cache"):
                fetch(HubId(repo="org/adapter"), ADAPTER_FILES)
            assert time.monotonic() - began < 30  # the client's own patience has no end


def test_a_folder_of_that_name_wins(hub: HubServer, adapters: dict[str, Path]) -> None:
    shutil.copytree(adapters["all-4"], "org/adapter")
    shutil.copytree(adapters["all-4"], "org/at@home")
    for source in ("org/adapter", "org/at@home", "/org/adapter", "./org/x", "a/b/c", "one"):
        assert find_id(source, None) is None, source
    assert find_id(Path("org/other"), None) is None
    assert find_id("org/other@v1.0", None) == HubId(repo="org/other", revision="v1.0")
    assert find_id("org/other", "refs/pr/4") == HubId(repo="org/other", revision="refs/pr/4")
    for source, revision in (
        ("org/adapter", "v1"), ("org/adapter@v1", None), (Path("org/other"), "v1"),
        ("org/other@v1", "v2"), ("org/other@", None), ("org/other", "../v1"), ("org/other", "a b"),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            find_id(source, revision)
    assert hub.asked == []


def test_offline_as_a_user_is(hub: HubServer, tiny_model: Path, tmp_path: Path) -> None:
    """A process of its own, with the client's settings and the cache that another one made."""
    commit = hub.publish("org/base", tiny_model)
    fetch(HubId(repo="org/base", revision="main"), hub_module.BASE_FILES)
    hub.asked.clear()
    program = """
import json, sys
from lora_dash import DashConfig, DashEngine
for base in json.loads(sys.argv[1]):
    try:
        with DashEngine(base, DashConfig(adapter_vram_pool="2MB", kv_pool="2MB")) as engine:
            (ended,) = engine.generate("hello", max_new_tokens=3)
            print(len(ended.token_ids) > 0)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
    bases = ["org/base", f"org/base@{commit}", "org/never"]
    ran = subprocess.run(
        [sys.executable, "-c", program, json.dumps(bases)],
        cwd=tmp_path / "here",
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_ENDPOINT": hub.url,
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    first, second, third = ran.stdout.splitlines()
    assert (first, second) == ("True", "True")
    assert third.startswith("UnsupportedModel: 'org/never' is not a folder here, ")
    assert "offline" in third
    assert hub.asked == []
