"""Gemma 4 as text: layers of two shapes, which may read earlier keys; per-layer embeddings."""

from __future__ import annotations

from typing import Any

from contract.layer_shapes import SHAPE_FIELDS, LayerShape, gemma4_shapes
from engine.errors import UnsupportedModel
from engine.model.families.gemma3 import NORMS
from engine.model.fields import FULL, SLIDING, Fields
from engine.model.kv_layers import KvLayers
from engine.model.plan import Plan
from engine.model.rope import read_rotation

_WINDOW, _PER_LAYER, _VOCABULARY = 512, 256, 262_144
_ROPES: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def read_plan(fields: Fields) -> Plan:
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        fields.take(name)  # enable_moe_block says whether there are experts
    for name in ("enable_moe_block", "attention_bias"):
        fields.expect(name, False)
    if fields.take("use_bidirectional_attention") not in (None, "vision"):  # the latter of images
        raise UnsupportedModel(
            "config.json: use_bidirectional_attention is not supported",
            param="use_bidirectional_attention",
        )
    fields.expect("quantization_config", None)
    fields.activation("gelu_pytorch_tanh", "hidden_activation")
    try:
        shapes = gemma4_shapes({name: fields.take(name) for name in SHAPE_FIELDS})
    except ValueError as error:
        raise UnsupportedModel(f"config.json: {error}", param=str(error).split()[0]) from error
    _check_heads(shapes, fields.size("num_attention_heads"))
    ropes, longest = fields.take("rope_parameters", _ROPES), fields.size("max_position_embeddings")
    if not isinstance(ropes, dict) or set(ropes) != {FULL, SLIDING}:
        raise UnsupportedModel(
            "config.json: rope_parameters has to be an object with full_attention and "
            "sliding_attention",
            param="rope_parameters",
        )
    full, sliding = (read_rotation(ropes[name], longest)[0] for name in (FULL, SLIDING))
    window = fields.size("sliding_window", _WINDOW)
    unread = [
        f"model.layers.{i}.self_attn.{name}"
        for i, shape in enumerate(shapes)
        if shape.keys_of is not None
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    ]
    cap = fields.take("final_logit_softcapping")
    has_inputs = fields.take("hidden_size_per_layer_input", _PER_LAYER) != 0
    fields.size("vocab_size_per_layer_input", _VOCABULARY)
    return Plan(
        eps=fields.epsilon(),
        rotations=tuple(full if shape.is_full else sliding for shape in shapes),
        windows=tuple(None if shape.is_full else window for shape in shapes),
        norms=NORMS,
        qk_norm="head",
        activation="gelu_tanh",
        embedding_scale=fields.size("hidden_size") ** 0.5,
        attention_scale=1.0,
        logit_cap=None if cap is None else fields.number("final_logit_softcapping", 0.0),
        shapes=shapes,
        per_layer=(
            fields.size("vocab_size_per_layer_input", _VOCABULARY),
            fields.size("hidden_size_per_layer_input", _PER_LAYER),
        )
        if has_inputs
        else None,
        unread=tuple(unread),
    )


def _check_heads(shapes: tuple[LayerShape, ...], heads: int) -> None:
    if any(heads % shape.kv_heads or shape.head_dim % 2 for shape in shapes):
        raise UnsupportedModel(
            f"config.json: {heads} attention heads must be a multiple of each layer's key and "
            "value heads, and their widths must be even",
            param="num_key_value_heads",
        )
    KvLayers(shapes)  # refuses keys that do not lie in one page
