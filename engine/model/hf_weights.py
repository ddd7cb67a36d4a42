"""Share a loaded Hugging Face model's weights with the decoder, so that memory holds them once.

The decoder keeps q, k and v as one matrix, gate and up as another. They are built here, and the
model's own parameters become views of them: the model still works and computes the same. While they
are built, at most one matrix is in memory twice.

A float16 model is copied to float32 instead: the engine has no float16, float32 holds each value
exactly, and the model stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModel
from engine.model.config import ModelConfig
from engine.model.weights import Matrix, Weights, build_weights, text_name

#: A parameter's dtype -> the dtype in which the engine computes.
_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that the caller has loaded, as far as the engine needs it."""

    config: ModelConfig
    weights: Weights
    device: str
    dtype: str


def share_model(model: Any, *, may_pack: bool = False) -> LoadedModel:
    """Return the weights of `model`, an AutoModelForCausalLM of a family that the decoder supports.

    Raises UnsupportedModel for any other model, and for one that has adapters or quantised weights
    or is spread over devices. Training the model later changes what the engine computes.

    may_pack  see `Weights`
    """
    _refuse(model)
    parameters = dict(model.named_parameters())
    buffers = model.named_buffers()  # Gemma 4 saves this one
    parameters |= {name: each for name, each in buffers if name.endswith(".layer_scalar")}
    first = next(iter(parameters.values()))
    for name, parameter in parameters.items():
        _check_parameter(name, parameter, first)
    config = _model_config(model)
    if config.has_images:
        named = ((text_name(name), each) for name, each in parameters.items())
        parameters = {name: each for name, each in named if name is not None}
    weights = build_weights(_Module(parameters), config, may_pack=may_pack)
    return LoadedModel(
        config=config, weights=weights, device=str(first.device), dtype=_DTYPES[first.dtype]
    )


def _refuse(model: Any) -> None:
    """Raise UnsupportedModel for kinds of models that the decoder cannot share."""
    kind = type(model).__name__
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModel(
            f"the {kind} has PEFT adapters: pass the base model without them "
            "(PeftModel.unload() gives it) and register the adapters by their folders"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"base is a {kind}: neither a folder nor a Hugging Face model")
    if getattr(model, "quantization_method", None) or getattr(model, "hf_quantizer", None):
        raise UnsupportedModel(f"the {kind} is quantised; the decoder needs plain weights")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"the {kind} has no language head: load AutoModelForCausalLM")


def _check_parameter(name: str, parameter: torch.Tensor, first: torch.Tensor) -> None:
    if type(parameter.data) is not torch.Tensor or parameter.dtype not in _DTYPES:
        raise UnsupportedModel(
            f"parameter {name} is a {type(parameter.data).__name__} of {parameter.dtype}; the "
            "decoder needs plain tensors of float32, bfloat16 or float16",
            param=name,
        )
    if parameter.device.type not in ("cpu", "cuda") or parameter.device != first.device:
        raise UnsupportedModel(
            f"parameter {name} is on {parameter.device}; all have to be on one device, a CPU or a "
            "GPU",
            param=name,
        )
    if parameter.dtype != first.dtype:
        raise UnsupportedModel(
            f"parameter {name} is {parameter.dtype}, others are {first.dtype}", param=name
        )


def _model_config(model: PreTrainedModel) -> ModelConfig:
    """Read the model's config as it would be saved: without the defaults of PreTrainedConfig."""
    common = PreTrainedConfig().to_dict()

    def own(fields: dict[str, Any]) -> dict[str, Any]:
        return {n: value for n, value in fields.items() if n not in common or common[n] != value}

    fields = own(model.config.to_dict())
    if isinstance(fields.get("text_config"), dict):
        fields["text_config"] = own(fields["text_config"])
    generation = model.generation_config
    eos = None if generation is None else generation.eos_token_id
    return ModelConfig.from_fields(fields, model.config.eos_token_id if eos is None else eos)


class _Module:
    """`TensorSource` over a module's parameters."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._is_copied = next(iter(parameters.values())).dtype == torch.float16

    def has(self, name: str) -> bool:
        return name in self._parameters

    def load(self, name: str, *shape: int) -> torch.Tensor:
        data = self._take(name, shape).data
        return data.float() if self._is_copied else data

    def load_fp4(self, name: str, *shape: int) -> torch.Tensor:
        raise UnsupportedModel(f"parameter {name} is quantised", param=name)

    def fuse(self, names: tuple[str, ...], heights: tuple[int, ...], width: int) -> Matrix:
        parts = [
            self._take(name, (height, width)) for name, height in zip(names, heights, strict=True)
        ]
        if self._is_copied:
            return torch.cat([part.data.float() for part in parts])
        fused = _joined(parts)
        if fused is None:
            fused = torch.cat([part.data for part in parts])
            for part, view in zip(parts, torch.split(fused, list(heights)), strict=True):
                part.data = view
        return fused

    def drop(self, suffix: str = "", prefix: str = "") -> None:
        left = (n for n in self._parameters if not (n.startswith(prefix) and n.endswith(suffix)))
        self._parameters = {name: self._parameters[name] for name in left}

    def check_all_taken(self) -> None:
        if self._parameters:
            name = min(self._parameters)
            raise UnsupportedModel(f"the decoder has no use for parameter {name}", param=name)

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.nn.Parameter:
        if name not in self._parameters:
            raise UnsupportedModel(f"the model has no parameter {name}", param=name)
        parameter = self._parameters.pop(name)
        if tuple(parameter.shape) != shape:
            raise UnsupportedModel(
                f"parameter {name} has shape {list(parameter.shape)}, not {list(shape)}",
                param=name,
            )
        return parameter


def _joined(parts: list[torch.nn.Parameter]) -> torch.Tensor | None:
    """Return the parts as one tensor if they already lie next to each other in memory, else None.

    They do when a second engine shares the same model.
    """
    first = parts[0].data
    end = first.data_ptr()
    for part in parts:
        storage = part.untyped_storage().data_ptr()
        is_next = part.data_ptr() == end and storage == first.untyped_storage().data_ptr()
        if not is_next or not part.is_contiguous():
            return None
        end += part.numel() * part.element_size()
    height = sum(len(part) for part in parts)
    return first.as_strided((height, *first.shape[1:]), first.stride())
