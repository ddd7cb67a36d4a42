"""Qwen3.5 and 3.6 with experts, as text; all tokens go through a shared one, too."""

from __future__ import annotations

from dataclasses import replace

from engine.model.families import qwen3_5
from engine.model.families.qwen3_moe import read_experts
from engine.model.fields import Fields
from engine.model.plan import Plan

_NUM, _INNER = 256, 512


def read_plan(fields: Fields) -> Plan:
    fields.take("intermediate_size")  # no layer has an MLP of its width
    fields.expect("norm_topk_prob", True)
    experts = read_experts(fields, _NUM, _INNER)._replace(is_normed=True, has_shared=True)
    plan = qwen3_5.read_plan(fields)
    return replace(plan, experts=experts, expert_layers=tuple(fields.layers))
