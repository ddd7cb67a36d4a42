"""Models and adapters by their id on the Hugging Face Hub, as folders of its client's cache.

`org/name` is the Hub's main branch at that moment, `org/name@revision` a branch, a tag or a commit.
Either is resolved to one commit, which does not change later. A commit that the cache has is not
downloaded again; if the Hub cannot be reached, the cache is used. The client, `huggingface_hub`,
comes with transformers and is imported when an id is given; its settings apply: HF_TOKEN, HF_HOME,
HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.adapters.files import CONFIG_FILE, TENSORS_FILE

# Seconds without an answer after which the Hub counts as unreachable; its client tries twice.
_SILENCE_S = 5.0
_ID = re.compile(r"(?P<repo>\w[\w.-]{0,95}/\w[\w.-]{0,95})(@(?P<revision>[^\0]{0,200}))?", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")

ADAPTER_FILES = (CONFIG_FILE, TENSORS_FILE)
_INDEX_FILE, _WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
BASE_FILES = (
    "config.json", "generation_config.json", _INDEX_FILE, "model*.safetensors",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template*",
)  # fmt: skip


class NotOnHub(OSError):
    """The Hub does not have the repository, refuses access, or cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubId:
    """A repository of the Hub. revision: None: its main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def find_id(source: str | Path, revision: str | None) -> HubId | None:
    """Return the Hub id that `source` is; None for a folder or what looks like its path.

    A folder of that name wins. Raises ValueError for a revision without an id, and for two.
    """
    match = _ID.fullmatch(source) if isinstance(source, str) else None
    if match is None or Path(match[0]).exists():
        if revision is not None:
            raise ValueError(
                f"{str(source)!r} is a folder; give `revision` only for an id on the Hub"
            )
        return None
    repo, own = match["repo"], match["revision"]
    given = own if revision is None else revision
    if Path(repo).exists():
        raise ValueError(f"{repo!r} is a folder; give a revision only for an id on the Hub")
    if own not in (None, given):
        raise ValueError(f"{source!r} and revision {revision!r} differ: give one of them")
    if given is not None and not (isinstance(given, str) and _REVISION.fullmatch(given)):
        raise ValueError(f"{given!r} is not a valid revision of {repo!r}")
    return HubId(repo=repo, revision=given)


def fetch(wanted: HubId, files: tuple[str, ...]) -> Path:
    """Return a folder with those `files` of the repository; download it unless it is cached.

    files  ADAPTER_FILES or BASE_FILES

    Raises NotOnHub.
    """
    if wanted.revision is not None and _COMMIT.fullmatch(wanted.revision):
        folder = _cached(wanted, files)
        if folder is not None:
            return folder
    try:
        return _download(wanted, files)
    except Exception as error:  # any error of a network client
        refusal = _refusal(wanted, error)
        if refusal is not None:
            raise NotOnHub(refusal) from error
        folder = _cached(wanted, files)
        if folder is not None:
            return folder
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotOnHub(
            f"{str(wanted)!r} is not a folder here, the Hub cannot be reached ({reason}), and its "
            "cache on this machine does not have all of its files"
        ) from error


def _download(wanted: HubId, files: tuple[str, ...]) -> Path:
    import huggingface_hub

    revision = wanted.revision or "main"
    # Without this, the download would wait for ever if the Hub does not answer.
    huggingface_hub.HfApi().model_info(wanted.repo, revision=revision, timeout=_SILENCE_S)
    return Path(
        huggingface_hub.snapshot_download(
            wanted.repo, revision=revision, allow_patterns=list(files), ignore_patterns=["*/*"]
        )
    )


def _cached(wanted: HubId, files: tuple[str, ...]) -> Path | None:
    """Return the folder in the cache if it has all files that are needed."""
    import huggingface_hub

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                wanted.repo,
                revision=wanted.revision or "main",
                allow_patterns=list(files),
                ignore_patterns=["*/*"],
                local_files_only=True,
            )
        )
    except (OSError, ValueError):
        return None
    return folder if _is_whole(folder, files) else None


def _is_whole(folder: Path, files: tuple[str, ...]) -> bool:
    needed: set[str] = set(files)
    if files == BASE_FILES:
        needed = {"config.json"}
        try:
            index: dict[str, Any] = json.loads((folder / _INDEX_FILE).read_text())
            needed.update(index["weight_map"].values())
        except FileNotFoundError:
            needed.add(_WEIGHTS_FILE)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False
    return all((folder / name).is_file() for name in needed)


def _refusal(wanted: HubId, error: Exception) -> str | None:
    """Return the reason that the Hub gave for refusing; None: it was not reached."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{wanted.repo!r} is gated: ask for access on the Hub, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{wanted.repo!r} is not a folder here, and the Hub has no such public repository; if "
            "it is private, set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{wanted.repo!r} has no revision {wanted.revision or 'main'!r} on the Hub"
    if isinstance(error, errors.HFValidationError):
        return f"{wanted.repo!r} is not a folder here, and not an id on the Hub: {error}"
    return None
