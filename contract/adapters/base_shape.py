"""The sizes of a base model that an adapter has to fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_QWEN3_HEAD_DIM = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape:
    """The matrices of a Llama-shaped base model that an adapter may change.

    linears          self_attn.q_proj … mlp.down_proj -> (in, out)
    hidden, vocab    sizes of the embedding and of the last matrix
    is_tied          those two are one, by the base's config
    biased           the linears that add a bias
    """

    num_layers: int
    linears: Mapping[str, tuple[int, int]]
    hidden: int
    vocab: int
    is_tied: bool
    biased: frozenset[str] = frozenset()

    def modules(self) -> Iterator[tuple[str, int | None, tuple[int, int]]]:
        """Return the dotted path of each module, its layer if it is in one, and (in, out)."""
        yield EMBEDDING, None, (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            for linear, widths in self.linears.items():
                yield f"model.layers.{layer}.{linear}", layer, widths
        yield HEAD, None, (self.hidden, self.vocab)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BaseShape:
        """Read a Hugging Face config.json. Raises ValueError naming the field that is wrong."""
        hidden = _size(config, "hidden_size")
        inner = _size(config, "intermediate_size")
        num_heads = _size(config, "num_attention_heads")
        family = config.get("model_type")
        # What a config leaves out is what it is to transformers, and so to the engine.
        default = _QWEN3_HEAD_DIM if family == "qwen3" else hidden // num_heads
        head_dim = _size(config, "head_dim", default)
        queries = num_heads * head_dim
        keys = _size(config, "num_key_value_heads", num_heads) * head_dim
        return cls(
            num_layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            vocab=_size(config, "vocab_size"),
            is_tied=bool(config.get("tie_word_embeddings")),
            biased=_biased(config),
            linears={
                "self_attn.q_proj": (hidden, queries),
                "self_attn.k_proj": (hidden, keys),
                "self_attn.v_proj": (hidden, keys),
                "self_attn.o_proj": (queries, hidden),
                "mlp.gate_proj": (hidden, inner),
                "mlp.up_proj": (hidden, inner),
                "mlp.down_proj": (inner, hidden),
            },
        )


def _biased(config: Mapping[str, Any]) -> frozenset[str]:
    names: set[str] = set()
    if config.get("attention_bias") or config.get("model_type") == "qwen2":
        names |= {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    if config.get("attention_bias"):
        names.add("self_attn.o_proj")
    if config.get("mlp_bias"):
        names |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    return frozenset(names)


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}, not a size")
    return value


def context_length(config: dict[str, Any]) -> int:
    """Return how many tokens, prompt and answer together, a base model reads.

    config  its config.json. YaRN stretches its original context by a factor, which configs that
            were published with it do not multiply out.
    """
    length = int(config.get("max_position_embeddings") or 0)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return length
    original = rope.get("original_max_position_embeddings") or length
    return max(length, int((rope.get("factor") or 1) * original))
