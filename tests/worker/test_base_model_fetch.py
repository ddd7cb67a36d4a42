"""A start without a mounted model: from the Hub, whole or not at all, or a word on what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.adapters.base_model import NotABaseModel
from tests.engine.dash.hub_server import HubServer
from worker import base_model_fetch
from worker.base_model_fetch import ensure_base_model
from worker.config import BaseModelConfig

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        yield server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    return folder


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


def test_a_repository_is_downloaded_once(hub: HubServer, model: Path, volume: Path) -> None:
    commit = hub.publish("org/Tiny-1", model)
    config = BaseModelConfig(folder=volume, repository="org/Tiny-1")
    found = ensure_base_model(config)
    assert (found.name, found.revision) == ("tiny-1", commit)
    assert not (found.path / "pytorch_model.bin").exists()
    assert config.find() == found  # as the worker, which does not ask the Hub, sees it
    hub.close()
    assert ensure_base_model(config) == found


def test_another_revision_takes_its_place(hub: HubServer, model: Path, volume: Path) -> None:
    hub.publish("org/tiny", model)
    first = ensure_base_model(BaseModelConfig(folder=volume, repository="org/tiny"))
    (model / "model.safetensors").write_bytes(b"others")
    commit = hub.publish("org/tiny", model, branch="dev")
    found = ensure_base_model(BaseModelConfig(folder=volume, repository="org/tiny", revision="dev"))
    assert found.revision == commit != first.revision
    assert (found.path / "model.safetensors").read_bytes() == b"others"


def test_what_the_hub_refuses_is_told(hub: HubServer, model: Path, volume: Path) -> None:
    for repository in ("org/nothing", "gated/model"):
        with pytest.raises(NotABaseModel, match=f"does not give {repository}@main.*HF_TOKEN"):
            ensure_base_model(BaseModelConfig(folder=volume, repository=repository))
    assert list(volume.iterdir()) == []


def test_another_model_in_the_volume_is_not_overwritten(
    hub: HubServer, model: Path, volume: Path
) -> None:
    hub.publish("org/one", model)
    hub.publish("org/two", model)
    ensure_base_model(BaseModelConfig(folder=volume, repository="org/one"))
    with pytest.raises(NotABaseModel, match="holds one: remove it"):
        ensure_base_model(BaseModelConfig(folder=volume, repository="org/two"))


def test_a_mounted_folder_is_looked_at_and_left_alone(model: Path) -> None:
    before = sorted(model.iterdir())
    found = ensure_base_model(BaseModelConfig(folder=model, origin="/srv/Big-Model"))
    assert found.name == "big-model"
    assert sorted(model.iterdir()) == before
    (model / "model.safetensors").unlink()
    with pytest.raises(NotABaseModel, match=r"no \*\.safetensors"):
        ensure_base_model(BaseModelConfig(folder=model, origin="/srv/Big-Model"))


def test_without_any_model_it_says_what_to_set(
    volume: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(base_model_fetch, "packaged_gguf", nothing)
    monkeypatch.setenv("LORIKEET_BASE_MODEL", str(volume))
    assert base_model_fetch.main() == 2
    said = capsys.readouterr().err
    assert "LORIKEET_BASE_MODEL_FOLDER" in said
    assert "LORIKEET_BASE_MODEL_REPOSITORY" in said


def test_it_prints_what_there_is(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORIKEET_BASE_MODEL", str(model))
    monkeypatch.setenv("LORIKEET_BASE_MODEL_NAME", "chosen")
    assert base_model_fetch.main() == 0
    assert json.loads(capsys.readouterr().out)["name"] == "chosen"
