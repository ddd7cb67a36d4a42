"""Check whether an uploaded adapter fits its base model. Pure functions over bytes.

The engine makes the same checks (`contract.adapters.fit`) when it loads an adapter, with wider
limits, so it refuses nothing that passes here. A check at upload tells the person who can change
the adapter.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from contract.adapters.base_shape import BaseShape
from contract.adapters.families import STACKED
from contract.adapters.fit import FittedAdapter, base_for, fit_adapter
from contract.adapters.peft_config import (
    FILE,
    MAX_RANK,
    UPLOAD_LIMITS,
    LoraConfig,
    load_json,
    read_config,
)
from contract.adapters.problems import AdapterProblems, Problem, shown
from contract.adapters.safetensors_header import UPLOAD_MAX_BYTES, Tensor, read_header


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAdapter:
    """An adapter whose config and header fit its base; its values are not checked yet."""

    config: LoraConfig
    tensors: tuple[Tensor, ...]
    fitted: FittedAdapter

    def report(self) -> dict[str, Any]:
        """Return facts for the version's page."""
        fitted, raw = self.fitted, self.config.raw
        own = [
            tensor for tensor in self.tensors if tensor.name not in {*fitted.copies, *fitted.unread}
        ]
        modules = {*fitted.matrices, *fitted.new_rows}
        return {
            "target_modules": sorted({module.split(".")[-1] for module in modules}),
            "ranks": sorted(fitted.ranks),
            "alpha": float(self.config.alpha),
            "use_rslora": self.config.use_rslora,
            "use_dora": self.config.use_dora,
            "dtypes": sorted({tensor.dtype for tensor in own}),
            "draft_heads": len(fitted.draft_heads),
            "num_tensors": len(own),
            "num_parameters": sum(math.prod(tensor.shape) for tensor in own),
            "peft_version": shown(raw.get("peft_version") or ""),
            "claimed_base": shown(raw.get("base_model_name_or_path") or ""),
        }


def check_adapter(
    *, config: bytes, start: bytes, file_bytes: int, base: BaseShape, max_rank: int
) -> CheckedAdapter:
    """Return the adapter, if its config and its tensors' names and shapes fit the base.

    config       adapter_config.json
    start        adapter_model.safetensors from its beginning to the end of its header, or further
    file_bytes   its whole length
    Raises AdapterProblems with all that is wrong.
    """
    limits = dataclasses.replace(UPLOAD_LIMITS, max_rank=min(max_rank, MAX_RANK))
    problems: list[Problem] = []
    lora = tensors = fitted = None
    try:
        lora = read_config(load_json(config, limits.max_bytes), limits)
    except AdapterProblems as found:
        problems += found.problems
    try:
        tensors = read_header(start, file_bytes, UPLOAD_MAX_BYTES)
    except AdapterProblems as found:
        problems += found.problems
    if lora is not None:
        names = [tensor.name for tensor in tensors or ()]
        problems += _unknown_targets(lora, base_for(lora, names, base))
    if lora is not None and tensors is not None:
        try:
            fitted = fit_adapter(lora, {tensor.name: tensor.shape for tensor in tensors}, base)
        except AdapterProblems as found:
            problems += found.problems
    if problems or lora is None or tensors is None or fitted is None:
        raise AdapterProblems(problems)
    return CheckedAdapter(config=lora, tensors=tensors, fitted=fitted)


def _unknown_targets(lora: LoraConfig, base: BaseShape) -> list[Problem]:
    """Report names in target_modules that the base does not have: PEFT ignores them."""
    shapes = (base, base.fused()) if base.fuses else (base,)
    modules = [each for of in shapes for each, _, _ in of.modules() if not each.endswith(STACKED)]
    known = ", ".join(dict.fromkeys(module.split(".")[-1] for module in modules))
    return [
        Problem(
            FILE,
            "target_modules",
            f"{shown(name)} is not a module that can be adapted; these are: {known}",
        )
        for name in lora.target_names
        if not any(f".{module}".endswith(f".{name}") for module in modules)
    ]
