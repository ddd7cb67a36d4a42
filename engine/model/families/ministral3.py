"""Ministral 3 as text: YaRN, and queries that grow beyond the original context."""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.model.fields import Fields
from engine.model.plan import Plan
from engine.model.rope import read_rotation


def read_plan(fields: Fields) -> Plan:
    rotation, growth = read_rotation(
        fields.rope(),
        fields.size("max_position_embeddings"),
        theta=fields.take("rope_theta"),
        grows=True,
    )
    if growth is None:
        name = "llama_4_scaling_beta"
        raise UnsupportedModel(f"config.json: rope parameter {name} is missing", param=name)
    return Plan(
        eps=fields.epsilon(),
        rotations=(rotation,) * len(fields.layers),
        windows=fields.one_window(),
        growth=growth,
    )
