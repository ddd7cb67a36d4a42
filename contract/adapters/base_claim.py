"""Compare the base model that an adapter names with the one here.

`base_model_name_or_path` is a Hub's `org/name`, a folder, or a name that somebody chose. Only what
is clearly another model's name is a mismatch: a folder's path says nothing, and the same model has
many mirrors and quantized copies. docs/adapters.md states the rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from contract.adapters.peft_config import FILE
from contract.adapters.problems import Problem, shown

NAME_FIELD, REVISION_FIELD = "base_model_name_or_path", "revision"

_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_HUB_FOLDER = re.compile(r"models--([\w.-]+)--([\w.-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: A name with a size, such as 8b or 0.5B, is a model's and not one that an operator made up.
_SIZE = re.compile(r"(?:^|[-_.])\d+(?:\.\d+)?[bm](?:$|[-_.])", re.IGNORECASE)
#: Suffixes that mirrors add to a model's name: the precision of its weights, or the format.
_COPY = re.compile(
    r"[-_.](?:unsloth|bnb|nf4|[2-8]bit|dwq|int[48]|fp8|fp16|bf16|gptq|awq|gguf|mlx|hf|dynamic|quantized"
    r"|w[48]a(?:8|16))$"
)


def repositories(folder: str) -> list[str]:
    """Return the Hub names that a base model's folder path contains.

    Its config.json has a `_name_or_path`, too, but often that of the model it was trained from.
    """
    return [f"{org}/{name}" for org, name in _HUB_FOLDER.findall(folder)]


def claim_problems(
    claimed: Mapping[str, Any], *, name: str, known_names: Iterable[str], revision: str
) -> list[Problem]:
    """Return what is wrong with the base model that an adapter_config.json claims.

    claimed      the config
    name         the base model's name here
    known_names  its other names, such as its Hub repository
    revision     its revision; compared if both are commits
    """
    known = [*known_names]
    if known or _SIZE.search(name):
        known.append(name)
    said, commit = claimed.get(NAME_FIELD), claimed.get(REVISION_FIELD)
    if not known or not isinstance(said, str) or not _HUB_NAME.fullmatch(said):
        return []
    if _model(said) not in {_model(each) for each in known}:
        message = f"it is {shown(said)}, not {_listed(known)}"
        return [Problem(FILE, NAME_FIELD, f"{message}: {_ADVICE}")]
    if isinstance(commit, str) and _COMMIT.fullmatch(commit) and _COMMIT.fullmatch(revision):
        if commit != revision:
            message = f"it is {commit}, but the base model here has revision {revision}"
            return [Problem(FILE, REVISION_FIELD, f"{message}: {_ADVICE}")]
    return []


_ADVICE = (
    "choose the base model that it was trained on; if it is the same model under another name, "
    'begin the version with accept_base_mismatch (console: the box "Accept another '
    'name of the base model"; command line: --accept-base-mismatch)'
)


def _listed(known: list[str]) -> str:
    return " or ".join(shown(name) for name in dict.fromkeys(known[:4]))


def _model(name: str) -> str:
    """Return a model's name without its organisation and without the suffixes of mirrors."""
    model = name.rpartition("/")[2].casefold().strip("._-")
    while (short := _COPY.sub("", model)) != model:
        model = short
    return model.removeprefix("meta-").replace("_", "-")
