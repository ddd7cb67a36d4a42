"""A base model's folder, in each form in which people have one, and what is said of others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from contract.adapters.base_model import NotABaseModel, as_name, find_base_model, fingerprint

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


def make(folder: Path, *, weights: bytes = b"weights", **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_folder_as_it_comes_has_its_own_name_and_a_sum_over_its_files(tmp_path: Path) -> None:
    folder = make(tmp_path / "Llama-3.1-8B-Instruct")
    found = find_base_model(folder)
    assert (found.path, found.name) == (folder, "llama-3.1-8b-instruct")
    assert found.revision == fingerprint(folder)
    assert found.config()["model_type"] == "llama"
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert find_base_model(copy).revision == found.revision


def test_a_mounted_folder_is_called_as_it_is_outside(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    assert find_base_model(folder, origin="/srv/models/Qwen2.5-7B/").name == "qwen2.5-7b"


def test_what_is_set_wins(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    (folder / "lorikeet.json").write_text('{"name": "noted", "revision": "r1"}')
    found = find_base_model(folder, origin="/srv/other")
    assert (found.name, found.revision) == ("noted", "r1")
    found = find_base_model(folder, name="chosen", revision="r2", origin="/srv/other")
    assert (found.name, found.revision) == ("chosen", "r2")


def test_the_hubs_client_notes_the_commit_beside_what_it_downloads(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    noted = folder / ".cache" / "huggingface" / "download"
    noted.mkdir(parents=True)
    (noted / "config.json.metadata").write_text(f"{COMMIT}\netag\n1.0\n")
    assert find_base_model(folder).revision == COMMIT


@pytest.mark.parametrize("is_mounted", [False, True])
def test_a_repository_in_the_hubs_cache(tmp_path: Path, is_mounted: bool) -> None:
    name = "model" if is_mounted else "models--org--Llama-3.1-8B"
    origin = "/home/ann/hub/models--org--Llama-3.1-8B" if is_mounted else ""
    repository = tmp_path / name
    make(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    found = find_base_model(repository, origin=origin)
    assert found.path == repository / "snapshots" / COMMIT
    assert (found.name, found.revision) == ("llama-3.1-8b", COMMIT)


def test_a_folder_with_nothing_but_a_model(tmp_path: Path) -> None:
    make(tmp_path / "tiny")
    make(tmp_path / ".tiny.part")
    (tmp_path / "lost+found").mkdir()
    assert find_base_model(tmp_path).name == "tiny"


def test_the_sum_changes_with_the_weights_wherever_they_differ(tmp_path: Path) -> None:
    large = bytearray(8 << 20)
    first = fingerprint(make(tmp_path / "first", weights=bytes(large)))
    for place in range(0, len(large), 1 << 10):  # as another training changes it: everywhere
        large[place] = 1
    assert fingerprint(make(tmp_path / "second", weights=bytes(large))) != first


def test_what_is_no_model_is_told_in_words(tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        with pytest.raises(NotABaseModel) as caught:
            find_base_model(folder)
        return str(caught.value)

    assert "is not a folder" in said(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json, but nothing" in said(tmp_path / "empty")
    two = tmp_path / "two"
    make(two / "a")
    make(two / "b")
    assert "no config.json, but a, b" in said(two)
    dangling = tmp_path / COMMIT
    dangling.mkdir()
    (dangling / "config.json").symlink_to("../../blobs/123")
    assert "links that lead out of it" in said(dangling)
    pointer = make(tmp_path / "pointer", weights=b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in said(pointer)
    broken = make(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    assert "is not JSON" in said(broken)


@pytest.mark.parametrize(
    ("text", "name"),
    [("Llama-3.1-8B", "llama-3.1-8b"), ("org/My Model!", "org-my-model"), ("_x_", "x")],
)
def test_names_are_such_as_requests_may_put_in_model(text: str, name: str) -> None:
    assert as_name(text) == name
