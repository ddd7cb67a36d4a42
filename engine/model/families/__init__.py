"""A file for each family of models: it reads what its config.json has beside what all have.

`PLANS` is what the engine serves; docs/adding-a-family.md says what a new one needs.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.model.families import llama, mistral, qwen2, qwen3
from engine.model.fields import Fields
from engine.model.plan import Plan

#: model_type -> what reads its config.json
PLANS: dict[str, Callable[[Fields], Plan]] = {
    "llama": llama.read_plan,
    "mistral": mistral.read_plan,
    "qwen2": qwen2.read_plan,
    "qwen3": qwen3.read_plan,
}
