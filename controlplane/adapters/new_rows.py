"""Rows of the embedding and of the last matrix that an adapter brings anew, by its config.

`modules_to_save` replaces a whole matrix, `trainable_token_indices` the rows of some tokens. The
engine decides the same by rules of its own, when it loads the adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from controlplane.adapters.rejection import Reason, shown

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
#: What a config may call them -> their dotted paths.
_PATHS = {"embed_tokens": EMBEDDING, EMBEDDING: EMBEDDING, HEAD: HEAD}
#: Parts of a tensor's key: of a module that is there whole, and of some of its rows.
MATRIX, ROWS = "weight", "trainable_tokens_delta"
_SAVE, _TOKENS = "modules_to_save", "trainable_token_indices"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """What a config asks for, before the base is known: modules by their dotted paths."""

    saved: frozenset[str]
    token_ids: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedRows:
    """The same over a base.

    shapes     (module, MATRIX or ROWS) -> the shape of the tensor that must be there
    saved      modules that are replaced whole, and so not adapted
    unadapted  modules over which LoRA, or at least DoRA, cannot lie
    """

    shapes: Mapping[tuple[str, str], tuple[int, ...]]
    saved: frozenset[str]
    unadapted: frozenset[str]


def read(raw: Mapping[str, Any], reasons: list[Reason]) -> NewRows:
    """From an adapter_config.json; what is wrong in it is added to `reasons`."""
    return NewRows(
        saved=_saved(raw.get(_SAVE) or [], reasons),
        token_ids=_token_ids(raw.get(_TOKENS) or {}, reasons),
    )


def _saved(names: Any, reasons: list[Reason]) -> frozenset[str]:
    if not isinstance(names, list):
        reasons.append(Reason(_SAVE, "it must be a list of module names"))
        return frozenset()
    found = [_path(_SAVE, name, reasons) for name in names]
    return frozenset(path for path in found if path is not None)


def _token_ids(given: Any, reasons: list[Reason]) -> dict[str, tuple[int, ...]]:
    if isinstance(given, list):
        given = {EMBEDDING: given}
    if not isinstance(given, dict):
        reasons.append(Reason(_TOKENS, "it must be a list of tokens, or an object of lists"))
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in given.items():
        path = _path(_TOKENS, name, reasons)
        if path is None:
            continue
        is_list = isinstance(ids, list) and ids and all(type(token) is int for token in ids)
        if not is_list or len(set(ids)) < len(ids):
            reasons.append(Reason(_TOKENS, f"{shown(name)} needs a list of tokens, none twice"))
        elif path in found:
            reasons.append(Reason(_TOKENS, f"it names {path} twice"))
        else:
            found[path] = tuple(ids)
    return found


def _path(field: str, name: Any, reasons: list[Reason]) -> str | None:
    path = _PATHS.get(name) if isinstance(name, str) else None
    if path is None:
        reasons.append(Reason(field, f"{shown(name)}: only embed_tokens and lm_head can be"))
    return path


def fit(
    rows: NewRows,
    *,
    vocab: int,
    hidden: int,
    is_tied: bool,
    ensures_tying: bool,
    use_dora: bool,
    reasons: list[Reason],
) -> FittedRows:
    """What they are over a base; what does not fit is added to `reasons`.

    is_tied  the base's last matrix is its embedding, by its config
    """
    saved, token_ids = rows.saved, dict(rows.token_ids)
    if is_tied and ensures_tying and saved:  # PEFT saves both, as one
        saved = frozenset((EMBEDDING, HEAD))
    changed, unadapted = set(token_ids), set(token_ids)
    if is_tied and EMBEDDING in token_ids:
        changed.add(HEAD)
        own = token_ids.get(HEAD, token_ids[EMBEDDING])
        if own == token_ids[EMBEDDING]:  # the head takes the embedding's rows
            token_ids.pop(HEAD, None)
            unadapted -= {HEAD}
            unadapted |= {HEAD} if use_dora else set()
        elif ensures_tying:
            reasons.append(Reason(_TOKENS, "ensure_weight_tying needs the same tokens of both"))
    for module in sorted(saved & changed):
        reasons.append(Reason(_TOKENS, f"modules_to_save replaces {module} whole"))
    for ids in token_ids.values():
        for token_id in (token_id for token_id in ids if not 0 <= token_id < vocab):
            message = f"{shown(token_id)} is no token of the base model, which has {vocab}"
            reasons.append(Reason(_TOKENS, message))
            break
    shapes = {(module, MATRIX): (vocab, hidden) for module in saved}
    shapes |= {(module, ROWS): (len(ids), hidden) for module, ids in token_ids.items()}
    return FittedRows(shapes=shapes, saved=saved, unadapted=frozenset(unadapted))
