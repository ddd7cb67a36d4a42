"""gpt-oss: attention with sinks, every second layer with a window; experts in MXFP4."""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.model.families.qwen3_moe import read_experts
from engine.model.fields import FULL, SLIDING, Fields, windows_of
from engine.model.plan import Plan
from engine.model.rope import read_rotation

_THETA, _WINDOW = 150_000.0, 128
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_NUM, _CHOSEN = 128, 4
_ALPHA, _LIMIT = 1.702, 7.0


def read_plan(fields: Fields) -> Plan:
    fields.take("initial_context_length")  # transformers does not read it
    fields.expect("moe_intermediate_size", None)
    experts = read_experts(fields, _NUM, fields.size("intermediate_size"), _CHOSEN)
    fields.expect("experts_per_token", experts.chosen)
    types = fields.layer_types([FULL if i % 2 else SLIDING for i in fields.layers])
    longest, theta = fields.size("max_position_embeddings"), fields.take("rope_theta", _THETA)
    rotation, _ = read_rotation(fields.rope() or _ROPE, longest, theta=theta)
    return Plan(
        eps=fields.epsilon(),
        rotations=(rotation,) * len(fields.layers),
        windows=windows_of(types, fields.window(_WINDOW)),
        has_sinks=True,
        experts=experts._replace(
            is_normed=True,  # as the softmax of the chosen ones' scores alone
            has_biases=True,
            is_fp4=_is_fp4(fields),
            alpha=fields.number("swiglu_alpha", _ALPHA),
            limit=fields.number("swiglu_limit", _LIMIT),
        ),
        expert_layers=tuple(fields.layers),
    )


def _is_fp4(fields: Fields) -> bool:
    """Return whether the experts' matrices, and no others, are stored in MXFP4."""
    given = fields.take("quantization_config")
    if not given:
        return False
    known = {"quant_method", "modules_to_not_convert", "dequantize"}
    if not isinstance(given, dict) or given.get("quant_method") != "mxfp4" or set(given) - known:
        raise UnsupportedModel(
            f"config.json: quantization_config is {given!r}; of this model_type the engine reads "
            "mxfp4: serve the folder in 16 bits instead",
            param="quantization_config",
        )
    return True
