"""Replacement: rows of the embedding or the LM head that an adapter replaces.

PEFT's `modules_to_save` replaces a whole matrix, `trainable_token_indices` the rows of some tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.adapters.base_shape import EMBEDDING, HEAD
from contract.adapters.fit import FittedAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """New rows of the embedding or the LM head, one for each token.

    name       the tensor [tokens, hidden size]
    token_ids  the rows' tokens, in the file's order; None: all tokens
    twin       a tensor that must repeat it: the head's, where the two are tied; None: there is none
    """

    name: str
    token_ids: tuple[int, ...] | None
    twin: str | None = None


def replacements(fitted: FittedAdapter) -> tuple[Replacement | None, Replacement | None]:
    """Return the new rows of the embedding and of the LM head; the same object if they are tied."""
    embedding, head = (_replacement(fitted, module) for module in (EMBEDDING, HEAD))
    return embedding, embedding if fitted.is_head_tied else head


def _replacement(fitted: FittedAdapter, module: str) -> Replacement | None:
    name = fitted.new_rows.get(module)
    if name is None:
        return None
    is_twin = fitted.is_head_tied and module == EMBEDDING
    return Replacement(
        name=name,
        token_ids=fitted.token_ids.get(module),
        twin=fitted.new_rows.get(HEAD) if is_twin else None,
    )
