"""Qwen3.5 and 3.6, dense, as text: most layers have a gated delta net, the others gated attention.

Positions of images have three coordinates. Those of text have three that are equal, with which the
sections of mRoPE turn as one.
"""

from __future__ import annotations

from contract.adapters.families import DELTA_SIZES, FAMILIES
from engine.errors import UnsupportedModel
from engine.model.fields import Fields
from engine.model.plan import Plan
from engine.model.rope import read_rotation
from kernels.delta import DeltaShape

_SHARE = 0.25


def read_plan(fields: Fields) -> Plan:
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"):
        fields.take(name)
    fields.expect("attn_output_gate", True)
    fields.expect("mamba_ssm_dtype", "float32")
    if fields.take("quantization_config"):
        raise UnsupportedModel(
            "config.json: quantization_config is not supported for this model_type",
            param="quantization_config",
        )
    layers, shape = _delta_layers(fields), _shape(fields)
    rope = fields.rope()
    if isinstance(rope, dict):
        rope = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    share = fields.number("partial_rotary_factor", _SHARE)
    theta, longest = fields.take("rope_theta"), fields.size("max_position_embeddings")
    rotation, _ = read_rotation(rope, longest, theta=theta, share=share)
    return Plan(
        eps=fields.epsilon(),
        rotations=tuple(None if i in layers else rotation for i in fields.layers),
        norm_offset=1.0,
        qk_norm="head",
        is_gated=True,
        delta=shape if layers else None,
        delta_layers=layers,
        unread=("mtp.",),
    )


def _shape(fields: Fields) -> DeltaShape:
    sizes = {n: fields.size(f"linear_{n}", default) for n, default in DELTA_SIZES.items()}
    if sizes["num_value_heads"] % sizes["num_key_heads"]:
        raise UnsupportedModel(
            "config.json: linear_num_value_heads is not a multiple of linear_num_key_heads",
            param="linear_num_value_heads",
        )
    return DeltaShape(
        num_keys=sizes["num_key_heads"],
        num_values=sizes["num_value_heads"],
        key_dim=sizes["key_head_dim"],
        value_dim=sizes["value_head_dim"],
        kernel=sizes["conv_kernel_dim"],
    )


def _delta_layers(fields: Fields) -> tuple[int, ...]:
    names = "num_hidden_layers", "layer_types", "full_attention_interval"
    try:
        layers = FAMILIES["qwen3_5_text"].delta_layers({name: fields.take(name) for name in names})
    except ValueError as error:
        raise UnsupportedModel(f"config.json: {error}", param="layer_types") from error
    if len(layers) == len(fields.layers):
        raise UnsupportedModel(
            "config.json: layer_types has no full_attention", param="layer_types"
        )
    return layers
