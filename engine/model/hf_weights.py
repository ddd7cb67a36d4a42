"""A loaded Hugging Face model's weights as the decoder wants them, held in memory once.

The decoder's q, k and v are one matrix, gate and up another. They are built here, and the model's
own parameters become views of their parts: the model goes on working and gives what it gave, and
the bytes are those of one model. At no time is more than one matrix there twice.

A float16 model is copied to float32 instead: the engine has no float16, float32 holds each of its
values exactly, and the model stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModel
from engine.model.config import ModelConfig
from engine.model.weights import Weights, build_weights

#: Of a model's parameters: what the engine computes in.
_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine needs of a model that somebody has loaded."""

    config: ModelConfig
    weights: Weights
    device: str
    dtype: str


def share_model(model: Any, *, may_pack: bool = False) -> LoadedModel:
    """The weights of `model`, an AutoModelForCausalLM of a family that the decoder knows.

    Raises UnsupportedModel for what is no such model, has adapters or quantised weights, or lies
    on several devices. Training the model later changes what the engine computes.

    may_pack  see `Weights`
    """
    _refuse(model)
    parameters = dict(model.named_parameters())
    first = next(iter(parameters.values()))
    for name, parameter in parameters.items():
        _check_parameter(name, parameter, first)
    config = _model_config(model)
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
    """The config as it would be saved: without what every model of transformers has."""
    common = PreTrainedConfig().to_dict()
    fields = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in common or common[name] != value
    }
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

    def fuse(self, names: tuple[str, ...], heights: tuple[int, ...], width: int) -> torch.Tensor:
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

    def drop(self, suffix: str) -> None:
        self._parameters = {n: p for n, p in self._parameters.items() if not n.endswith(suffix)}

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
    """The parts as one tensor if they lie one behind the other already, as a second engine over
    the same model finds them."""
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
