"""Qwen3 with experts: the attention of Qwen3; in most layers a router chooses among many MLPs."""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.model.fields import Fields
from engine.model.plan import Plan
from kernels.experts import ExpertShape

_WINDOW = 4096
_NUM, _CHOSEN, _INNER = 128, 8, 768


def read_plan(fields: Fields) -> Plan:
    for name in ("max_window_layers", "sliding_window"):
        fields.take(name)
    fields.expect("quantization_config", None)
    return Plan(
        eps=fields.epsilon(),
        rotations=fields.rotations(),
        windows=fields.one_window(_WINDOW) if fields.flag("use_sliding_window") else (),
        qk_norm="head",
        experts=read_experts(fields, _NUM, _INNER)._replace(
            is_normed=fields.flag("norm_topk_prob")
        ),
        expert_layers=_layers(fields),
    )


def read_experts(fields: Fields, num: int, inner: int, chosen: int = _CHOSEN) -> ExpertShape:
    """Read the experts' shape.

    num, inner, chosen  where config.json has none
    """
    fields.take("router_aux_loss_coef")
    fields.expect("output_router_logits", False)  # it adds to the loss that is trained
    num = fields.size("num_experts", fields.size("num_local_experts", num))
    fields.expect("num_local_experts", num)
    chosen = fields.size("num_experts_per_tok", chosen)
    if chosen > num:
        raise UnsupportedModel(
            f"config.json: num_experts_per_tok is {chosen}, and there are {num} experts",
            param="num_experts_per_tok",
        )
    return ExpertShape(num, chosen, fields.size("moe_intermediate_size", inner))


def _layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers that have experts."""
    step, dense = fields.size("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise UnsupportedModel(
            f"config.json: mlp_only_layers is {dense!r}, not a list of layers",
            param="mlp_only_layers",
        )
    return tuple(i for i in fields.layers if i not in dense and (i + 1) % step == 0)
