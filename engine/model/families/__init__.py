"""A file for each family of models: it reads what its config.json has beside what all have.

`PLANS` is what the engine serves; docs/adding-a-family.md says what a new one needs.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.model.families import (
    cohere2,
    exaone4,
    gemma3,
    gemma4,
    glm4,
    gpt_oss,
    granite,
    llama,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from engine.model.fields import Fields
from engine.model.plan import Plan

#: model_type -> what reads its config.json
PLANS: dict[str, Callable[[Fields], Plan]] = {
    "llama": llama.read_plan,
    "mistral": mistral.read_plan,
    "qwen2": qwen2.read_plan,
    "qwen3": qwen3.read_plan,
    "smollm3": smollm3.read_plan,
    "granite": granite.read_plan,
    "phi3": phi3.read_plan,
    "olmo2": olmo2.read_plan,
    "gemma3_text": gemma3.read_plan,
    "seed_oss": seed_oss.read_plan,
    "ministral3": ministral3.read_plan,
    "exaone4": exaone4.read_plan,
    "glm4": glm4.read_plan,
    "olmo3": olmo3.read_plan,
    "cohere2": cohere2.read_plan,
    "qwen3_5_text": qwen3_5.read_plan,
    "qwen3_moe": qwen3_moe.read_plan,
    "qwen3_5_moe_text": qwen3_5_moe.read_plan,
    "gpt_oss": gpt_oss.read_plan,
    "gemma4_text": gemma4.read_plan,
}
