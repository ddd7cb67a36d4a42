"""Command R7B and A: LayerNorms, attention beside the MLP; full layers have no positions."""

from __future__ import annotations

from engine.model.fields import FULL, SLIDING, Fields, windows_of
from engine.model.plan import Norms, Plan

_WINDOW, _PATTERN = 4096, 4
_LOGIT_SCALE = 0.0625
# Fields of published configs that transformers does not read, and the one value that is meant.
_FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}


def read_plan(fields: Fields) -> Plan:
    for name, value in _FIXED.items():
        fields.expect(name, value)
    fields.expect("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    fields.take("layer_switch")
    pattern = fields.size("sliding_window_pattern", _PATTERN)
    types = fields.layer_types([SLIDING if (i + 1) % pattern else FULL for i in fields.layers])
    rotations = fields.rotations(is_interleaved=True)
    return Plan(
        eps=fields.epsilon("layer_norm_eps"),
        rotations=tuple(
            rotation if name == SLIDING else None
            for rotation, name in zip(rotations, types, strict=True)
        ),
        windows=windows_of(types, fields.size("sliding_window", _WINDOW)),
        norms=Norms("input_layernorm", None, None, None),
        is_centred=True,
        is_parallel=True,
        logit_scale=fields.number("logit_scale", _LOGIT_SCALE),
    )
