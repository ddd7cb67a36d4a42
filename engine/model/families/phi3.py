"""Phi-3, Phi-3.5 and Phi-4 as text: q, k and v are one matrix, gate and up another."""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.model.fields import Fields
from engine.model.plan import Plan
from engine.model.rope import LongRope, read_rotation


def read_plan(fields: Fields) -> Plan:
    """Read the plan. With LongRoPE the context is the original one: its short divisors alone."""
    for name in ("embd_pdrop", "resid_pdrop"):
        fields.take(name)
    for name in ("full_attn_mod", "interpolate_factor"):  # transformers does not read them
        fields.expect(name, 1)
    rope, longest = dict(fields.rope() or {}), fields.size("max_position_embeddings")
    original = fields.take("original_max_position_embeddings")
    if rope.get("rope_type", rope.get("type")) == "su":
        rope["rope_type"] = "longrope"
    if rope.get("rope_type", rope.get("type")) == "longrope" and original is not None:
        rope.setdefault("original_max_position_embeddings", original)
    share = fields.number("partial_rotary_factor", 1.0)
    theta = fields.take("rope_theta")
    rotation, _ = read_rotation(rope, longest, theta=theta, share=share)
    scaling, head_dim = rotation.scaling, fields.head_dim()
    if isinstance(scaling, LongRope):
        width = int(head_dim * rotation.share)
        if 2 * len(scaling.divisors) != width:
            raise UnsupportedModel(
                f"config.json: rope parameter short_factor has {len(scaling.divisors)} numbers, "
                f"not {width // 2}",
                param="short_factor",
            )
        longest = min(longest, scaling.max_positions)
    elif scaling is not None:
        raise UnsupportedModel(
            "config.json: the rope_type of phi3 is default or longrope", param="rope_type"
        )
    return Plan(
        eps=fields.epsilon(),
        rotations=(rotation,) * len(fields.layers),
        windows=fields.one_window(),
        max_positions=longest if isinstance(scaling, LongRope) else None,
    )
