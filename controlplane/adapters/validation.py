"""Does an uploaded adapter fit its base model? Pure functions over bytes.

The engine asks the same when it loads an adapter and refuses nothing that passes here; asked at
upload, the answer reaches the person who can change something.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from controlplane.adapters import peft_config, tensor_file
from controlplane.adapters.peft_config import LoraConfig
from controlplane.adapters.rejection import Reason, Rejected, shown
from controlplane.adapters.tensor_file import Tensor

_TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<module>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\."
    r"(?P<linear>(?:self_attn|mlp)\.[a-z_]+))\.lora_(?P<side>[AB])\.weight",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape:
    """The linears of a Llama-shaped base model that an adapter may change.

    linears   self_attn.q_proj … mlp.down_proj -> (in, out)
    """

    num_layers: int
    linears: Mapping[str, tuple[int, int]]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BaseShape:
        """From a Hugging Face config.json. Raises ValueError naming the field that is wrong."""
        hidden = _size(config, "hidden_size")
        inner = _size(config, "intermediate_size")
        num_heads = _size(config, "num_attention_heads")
        head_dim = _size(config, "head_dim", hidden // num_heads)
        queries = num_heads * head_dim
        keys = _size(config, "num_key_value_heads", num_heads) * head_dim
        return cls(
            num_layers=_size(config, "num_hidden_layers"),
            linears={
                "self_attn.q_proj": (hidden, queries),
                "self_attn.k_proj": (hidden, keys),
                "self_attn.v_proj": (hidden, keys),
                "self_attn.o_proj": (queries, hidden),
                "mlp.gate_proj": (hidden, inner),
                "mlp.up_proj": (hidden, inner),
                "mlp.down_proj": (inner, hidden),
            },
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAdapter:
    """An adapter whose config and header fit its base; its values are not looked at yet."""

    config: LoraConfig
    tensors: tuple[Tensor, ...]

    @property
    def ranks(self) -> set[int]:
        return {tensor.shape[0] for tensor in self.tensors if ".lora_A." in tensor.name}

    def report(self) -> dict[str, Any]:
        """Facts for the version's page."""
        linears = {_located(tensor.name)["linear"].split(".")[1] for tensor in self.tensors}
        raw = self.config.raw
        return {
            "target_modules": sorted(linears),
            "ranks": sorted(self.ranks),
            "alpha": self.config.alpha,
            "use_rslora": self.config.use_rslora,
            "dtypes": sorted({tensor.dtype for tensor in self.tensors}),
            "num_tensors": len(self.tensors),
            "num_parameters": sum(tensor.shape[0] * tensor.shape[1] for tensor in self.tensors),
            "peft_version": shown(raw.get("peft_version") or ""),
            "claimed_base": shown(raw.get("base_model_name_or_path") or ""),
        }


def check_adapter(
    *, config: bytes, start: bytes, file_bytes: int, base: BaseShape, max_rank: int
) -> CheckedAdapter:
    """The adapter, if its config and its tensors' names and shapes fit the base.

    config       adapter_config.json
    start        adapter_model.safetensors from its beginning to the end of its header, or further
    file_bytes   its whole length
    Raises Rejected with everything found wrong.
    """
    reasons: list[Reason] = []
    lora = tensors = None
    try:
        lora = peft_config.parse_config(config, max_rank=max_rank)
    except Rejected as rejected:
        reasons += rejected.reasons
    try:
        tensors = tensor_file.parse_header(start, file_bytes)
    except Rejected as rejected:
        reasons += rejected.reasons
    if lora is None or tensors is None:
        raise Rejected(reasons)
    reasons += _misfits(lora, tensors, base)
    if reasons:
        raise Rejected(reasons)
    return CheckedAdapter(config=lora, tensors=tensors)


def _misfits(lora: LoraConfig, tensors: tuple[Tensor, ...], base: BaseShape) -> list[Reason]:
    """What does not fit: each tensor of each module the config names must be there, no other."""
    expected: dict[str, tuple[int, int]] = {}
    for layer in range(base.num_layers):
        for linear, (width_in, width_out) in base.linears.items():
            module = f"model.layers.{layer}.{linear}"
            if lora.is_target(module, layer):
                rank = lora.rank_of(module)
                expected[f"base_model.model.{module}.lora_A.weight"] = (rank, width_in)
                expected[f"base_model.model.{module}.lora_B.weight"] = (width_out, rank)
    reasons = _unknown_targets(lora, base)
    for tensor in tensors:
        shape = expected.pop(tensor.name, None)
        if shape is None:
            reasons.append(Reason(shown(tensor.name), _why_unexpected(tensor.name, base)))
        elif tensor.shape != shape:
            message = f"its shape is {list(tensor.shape)}; the base model and the rank need"
            reasons.append(Reason(tensor.name, f"{message} {list(shape)}"))
    reasons += [
        Reason(name, "it is missing: target_modules and layers_to_transform ask for it")
        for name in expected
    ]
    return reasons


def _unknown_targets(lora: LoraConfig, base: BaseShape) -> list[Reason]:
    modules = [
        f"model.layers.{n}.{linear}" for n in range(base.num_layers) for linear in base.linears
    ]
    known = ", ".join(linear.split(".")[1] for linear in base.linears)
    reasons = []
    for name in lora.target_modules:
        if not any(module == name or module.endswith(f".{name}") for module in modules):
            message = f"{shown(name)} is no linear layer that can be adapted; these can: {known}"
            reasons.append(Reason("target_modules", message))
    return reasons


def _why_unexpected(name: str, base: BaseShape) -> str:
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return "it is not a LoRA matrix of a layer's linear"
    if int(match["layer"]) >= base.num_layers:
        return f"the base model has {base.num_layers} layers, 0 to {base.num_layers - 1}"
    if match["linear"] not in base.linears:
        return f"the base model has no linear {shown(match['linear'])}"
    return "adapter_config.json does not name its module"


def _located(name: str) -> re.Match[str]:
    match = _TENSOR_NAME.fullmatch(name)
    assert match is not None  # check_adapter took the name
    return match


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}, not a size")
    return value
