"""Find the base model in a folder; every machine with the same folder gets the same answer.

The folder is a Hugging Face model: config.json, tokenizer files, safetensors. It can also be a
repository's folder in the Hub client's cache (with refs/ and snapshots/), or a folder that contains
exactly one model's folder. `lorikeet.json` ({"name", "revision"}) in it is optional.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "config.json"
MANIFEST = "lorikeet.json"
#: Where `hf download --local-dir` records the commit of each file.
_DOWNLOADS = Path(".cache", "huggingface", "download")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_NAME = 63
_MAX_REVISION = 64
#: The fingerprint reads this many blocks of a large file, and this many bytes in each.
_PLACES, _PLACE_BYTES = 64, 1 << 16


class NotABaseModel(ValueError):
    """Raised when a folder is not a base model's or cannot be read; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelFolder:
    """A base model on this machine: its folder, its name in requests, its revision in digests."""

    path: Path
    name: str
    revision: str

    def config(self) -> dict[str, Any]:
        """Return config.json. Raises NotABaseModel."""
        return _read_object(self.path / CONFIG)


def find_base_model(
    folder: Path, *, name: str = "", revision: str = "", origin: str = ""
) -> BaseModelFolder:
    """Return the base model in `folder`.

    name, revision  the operator's settings; empty: those of lorikeet.json, else the folder's name
                    and the commit that the Hub's client recorded, else a fingerprint of the files
    origin          the folder's path on the host, if it is mounted under another one here

    Raises NotABaseModel.
    """
    path, commit = _model_in(folder)
    _read_object(path / CONFIG)
    manifest = _read_object(path / MANIFEST) if (path / MANIFEST).exists() else {}
    _check_weights(path)
    outside = Path(origin) if origin and path == folder else path
    name = name or str(manifest.get("name") or "") or as_name(_called(outside, commit, origin))
    revision = revision or str(manifest.get("revision") or "") or commit
    return BaseModelFolder(
        path=path,
        name=name[:_MAX_NAME],
        revision=(revision or _noted_commit(path) or fingerprint(path))[:_MAX_REVISION],
    )


def as_name(text: str) -> str:
    """Return a valid model name: `Llama-3.1-8B` becomes llama-3.1-8b."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("._-")
    return name[:_MAX_NAME].strip("._-")


def _model_in(folder: Path) -> tuple[Path, str]:
    """Return the folder with config.json, and the commit if the Hub client's cache names it."""
    try:
        if not folder.is_dir():
            raise NotABaseModel(f"{folder} is not a folder")
        if (folder / CONFIG).exists():
            return folder, folder.name if _COMMIT.fullmatch(folder.name) else ""
        if (folder / "snapshots").is_dir():
            return _snapshot(folder)
        inner = [p for p in folder.iterdir() if p.name[0] != "." and (p / CONFIG).exists()]
        files = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise NotABaseModel(_unreadable(folder, error)) from error
    if len(inner) == 1:
        return inner[0], ""
    if (folder / CONFIG).is_symlink():
        raise NotABaseModel(
            f"{folder} has links that lead out of it: give the folder models--… above snapshots/, "
            "or one made by `hf download --local-dir`"
        )
    there = ", ".join(files[:8]) or "nothing"
    raise NotABaseModel(f"{folder} is no base model's folder: no config.json, but {there}")


def _snapshot(repository: Path) -> tuple[Path, str]:
    ref = repository / "refs" / "main"
    found = sorted(path.name for path in (repository / "snapshots").iterdir())
    commit = ref.read_text().strip() if ref.exists() else found[-1] if found else ""
    path = repository / "snapshots" / commit
    if not commit or not (path / CONFIG).exists():
        raise NotABaseModel(f"{repository} has no snapshot with a config.json")
    return path, commit


def _called(path: Path, commit: str, origin: str) -> str:
    """Return the last part of the folder's path, or of the Hub's name of the model."""
    if commit and path.parent.name == "snapshots":
        path = Path(origin) if origin else path.parent.parent
        if path.parent.name == "snapshots":
            path = path.parent.parent
    return path.name.rpartition("--")[2]


def _noted_commit(path: Path) -> str:
    try:
        first = (path / _DOWNLOADS / f"{CONFIG}.metadata").read_text().partition("\n")[0].strip()
    except OSError:
        return ""
    return first if _COMMIT.fullmatch(first) else ""


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise NotABaseModel(_unreadable(path, error)) from error
    except ValueError as error:
        raise NotABaseModel(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise NotABaseModel(f"{path} is not a JSON object")
    return content


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"{path} cannot be read by this account: `chmod -R a+rX` the model's folder"
    return f"{path} cannot be read: {error.strerror}"


def _check_weights(path: Path) -> None:
    for file in _weights(path):
        try:
            with file.open("rb") as weights:
                start = weights.read(64)
        except OSError as error:
            raise NotABaseModel(_unreadable(file, error)) from error
        if start.startswith(b"version https://git-lfs"):
            raise NotABaseModel(f"{file} is a pointer, not the weights: run `git lfs pull`")


def _weights(path: Path) -> Iterator[Path]:
    yield from sorted(path.glob("*.safetensors"))


def fingerprint(path: Path) -> str:
    """Return a sha256 of the model's files; of large files it reads evenly spaced blocks.

    A model trained differently has other values in every block.
    """
    digest = hashlib.sha256()
    names = {CONFIG, "tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
    for file in [*(path / name for name in sorted(names)), *_weights(path)]:
        if file.exists():
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            for piece in _pieces(file, size):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as content:
        if size <= _PLACES * _PLACE_BYTES:
            yield content.read()
            return
        for place in range(_PLACES):
            content.seek((size - _PLACE_BYTES) * place // (_PLACES - 1))
            yield content.read(_PLACE_BYTES)
