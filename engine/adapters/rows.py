"""Rows of the embedding and of the last matrix that an adapter brings anew, by its config.

`modules_to_save` replaces a whole matrix, `trainable_token_indices` the rows of some tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.adapter_fit import FittedAdapter
from contract.base_shape import EMBEDDING, HEAD


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


def replacements(fitted: FittedAdapter) -> tuple[Replacement | None, Replacement | None]:
    """The embedding's new rows and the last matrix's; equal where those are tied."""
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
