"""Rows of the embedding and of the last matrix that an adapter brings anew, by its config.

`modules_to_save` replaces a whole matrix, `trainable_token_indices` the rows of some tokens. What
PEFT does where the base's two are tied is done here too.
Source: set_additional_trainable_modules in peft/utils/other.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import AdapterMismatch

EMBEDDING_MODULE, HEAD_MODULE = "model.embed_tokens", "lm_head"
_MODULES = {
    "embed_tokens": EMBEDDING_MODULE,
    EMBEDDING_MODULE: EMBEDDING_MODULE,
    HEAD_MODULE: HEAD_MODULE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Rows of the embedding or of the last matrix that stand in the file anew, by tokens.

    name       of the tensor [tokens, hidden size]
    token_ids  whose they are, in the file's order; None: of all
    twin       a tensor that repeats them, as the head's of tied ones; None: there is none
    """

    name: str
    token_ids: tuple[int, ...] | None
    twin: str | None = None


class RowTensors:
    """What the config wants of such tensors, and those that the file has.

    saved         modules that the file has whole, by their dotted paths
    token_ids     modules of which it has rows, and of which tokens
    is_head_tied  the head takes the embedding's rows; of a saved one the file has a second copy

    Raises AdapterMismatch naming the field that cannot be honoured; so do all methods.
    """

    def __init__(
        self, config: Mapping[str, Any], vocab_size: int, hidden_size: int, *, is_tied: bool
    ) -> None:
        """is_tied: the base's config says that the last matrix is the embedding."""
        self._shape = vocab_size, hidden_size
        self._use_dora = bool(config.get("use_dora"))
        self.saved = _saved(config.get("modules_to_save"))
        self.token_ids = _token_ids(config.get("trainable_token_indices"), vocab_size)
        self._found: dict[str, str] = {}  # module -> its tensor
        ensures = is_tied and bool(config.get("ensure_weight_tying"))
        self.is_head_tied = ensures and bool(self.saved)
        if self.is_head_tied:
            self.saved = frozenset((EMBEDDING_MODULE, HEAD_MODULE))
        changed = set(self.token_ids)
        if is_tied and EMBEDDING_MODULE in self.token_ids:
            self._tie_tokens(ensures)
            changed.add(HEAD_MODULE)
        for module in sorted(self.saved & changed):
            raise _unsupported(
                "trainable_token_indices",
                f"changes {module.split('.')[-1]}, which modules_to_save replaces",
            )

    def _tie_tokens(self, ensures: bool) -> None:
        """The head takes the embedding's rows unless the config has other tokens for it."""
        own = self.token_ids.get(HEAD_MODULE)
        self.is_head_tied = own is None or own == self.token_ids[EMBEDDING_MODULE]
        if self.is_head_tied:
            self.token_ids.pop(HEAD_MODULE, None)
        elif ensures:
            raise _unsupported(
                "trainable_token_indices",
                "has other tokens for lm_head than for embed_tokens, though ensure_weight_tying "
                "is on",
            )

    def note(self, name: str, module: str, shape: tuple[int, ...], *, is_whole: bool) -> None:
        """The file has a tensor of a module's rows, of all or of some."""
        if module not in (self.saved if is_whole else self.token_ids):
            raise AdapterMismatch(
                f"tensor {name} is of a module that trainable_token_indices does not name",
                param=name,
            )
        if module in self._found:
            raise AdapterMismatch(f"tensor {name} repeats {self._found[module]}", param=name)
        count = self._shape[0] if is_whole else len(self.token_ids[module])
        if shape != (count, self._shape[1]):
            raise AdapterMismatch(
                f"tensor {name} has shape {list(shape)}; the base and the config need "
                f"{[count, self._shape[1]]}",
                param=name,
            )
        self._found[module] = name

    def check(self, *, adapted: Mapping[str, str], copies: Mapping[str, str]) -> None:
        """Whether all are there, and none meets what PEFT has no place for.

        adapted, copies  modules that LoRA changes, or that the file repeats: a tensor of each
        """
        for module in sorted((self.saved | self.token_ids.keys()) - self._found.keys()):
            field = "modules_to_save" if module in self.saved else "trainable_token_indices"
            raise AdapterMismatch(
                f"adapter_model.safetensors has no tensor of {module}, which {field} names",
                param=field,
            )
        for module, name in (*adapted.items(), *copies.items()):
            # PEFT puts plain LoRA over a head that is tied to new rows, and fails with DoRA.
            is_tied = self.is_head_tied and module == HEAD_MODULE and self._use_dora
            if module in self._found or (is_tied and module in adapted):
                raise AdapterMismatch(
                    f"tensor {name} is of a module whose rows the adapter replaces", param=name
                )

    @property
    def embedding(self) -> Replacement | None:
        """The embedding's new rows; equal to the head's where those are tied."""
        name, twin = self._found.get(EMBEDDING_MODULE), self._found.get(HEAD_MODULE)
        if name is None:
            return None
        return Replacement(
            name=name,
            token_ids=self.token_ids.get(EMBEDDING_MODULE),
            twin=twin if self.is_head_tied else None,
        )

    @property
    def head(self) -> Replacement | None:
        """The last matrix's."""
        if self.is_head_tied:
            return self.embedding
        name = self._found.get(HEAD_MODULE)
        if name is None:
            return None
        return Replacement(name=name, token_ids=self.token_ids.get(HEAD_MODULE))


def _saved(names: Any) -> frozenset[str]:
    if not names:
        return frozenset()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _unsupported("modules_to_save", "is no list of names")
    return frozenset(_module("modules_to_save", name) for name in names)


def _token_ids(given: Any, vocab_size: int) -> dict[str, tuple[int, ...]]:
    if not given:
        return {}
    if isinstance(given, list):
        given = {EMBEDDING_MODULE: given}
    if not isinstance(given, dict):
        raise _unsupported("trainable_token_indices", "is neither a list nor an object of lists")
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in given.items():
        module = _module("trainable_token_indices", name)
        if module in found:
            raise _unsupported("trainable_token_indices", f"names {module} twice")
        if not isinstance(ids, list) or not ids:
            raise _unsupported("trainable_token_indices", f"has no list of tokens for {name}")
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise _unsupported(
                    "trainable_token_indices",
                    f"has {repr(token_id)[:80]}, not a token from 0 to {vocab_size - 1}",
                )
        if len(set(ids)) < len(ids):
            raise _unsupported("trainable_token_indices", "has a token twice")
        found[module] = tuple(ids)
    return found


def _module(field: str, name: str) -> str:
    if name not in _MODULES:
        raise _unsupported(
            field, f"names {name[:80]!r}; only embed_tokens and lm_head are supported"
        )
    return _MODULES[name]


def _unsupported(field: str, problem: str) -> AdapterMismatch:
    return AdapterMismatch(f"adapter_config.json: {field} {problem}", param=field)
