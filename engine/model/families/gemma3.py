"""Gemma 3 as text: norms on both sides, GELU, layers with a window that turn in their own way."""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.model.fields import FULL, SLIDING, Fields, windows_of
from engine.model.plan import Norms, Plan

_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN, _WINDOW = 6, 4096
_SCALAR = 256.0
#: The names of the norms, which Gemma 4 has, too.
NORMS = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def read_plan(fields: Fields) -> Plan:
    for name in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ):
        if fields.take(name):
            raise UnsupportedModel(f"config.json: {name} is not supported", param=name)
    fields.activation("gelu_pytorch_tanh", "hidden_activation")
    pattern = fields.size("sliding_window_pattern", _PATTERN)
    fields.take("_sliding_window_pattern")  # transformers writes it and does not read it
    types = fields.layer_types([SLIDING if (i + 1) % pattern else FULL for i in fields.layers])
    return Plan(
        eps=fields.epsilon(),
        rotations=fields.rotations_by_type(types, _THETA, _LOCAL_THETA, "rope_local_base_freq"),
        windows=windows_of(types, fields.size("sliding_window", _WINDOW)),
        norms=NORMS,
        norm_offset=1.0,
        qk_norm="head",
        activation="gelu_tanh",
        embedding_scale=fields.size("hidden_size") ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar", _SCALAR) ** -0.5,
    )
