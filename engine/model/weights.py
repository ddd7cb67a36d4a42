"""Weights: the decoder's tensors, read from a checkpoint by their Hugging Face names.

q, k and v become one matrix, gate and up another: one product instead of three or two. Files are
memory-mapped. The decoder must know every tensor in them, and none may be missing. The config says
which optional biases and norms the model has.

Linears of the layers may be quantised: as the checkpoint has them, or to FP8 as they are read. The
embedding, the last matrix, biases and norms never are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from contract.adapters.families import DELTA_IN, DELTA_OUT, FUSED, MLP, QKV, O
from engine.errors import UnsupportedModel
from engine.model.config import ModelConfig
from engine.model.fp4_tensors import FP4_GROUP, dense_fp4
from engine.model.int4_tensors import read_int4
from engine.model.per_layer import PerLayerGate, PerLayerWeights
from engine.model.quantization import Fp8Scheme, Int4Scheme
from kernels.delta import DeltaShape, DeltaWeights
from kernels.experts import ExpertShape, ExpertWeights
from kernels.fp8 import FP8, Fp8Matrix, quantize_matrix
from kernels.fp8_groups import GROUP
from kernels.int4 import Int4Matrix

#: A layer's linears, as `LayerWeights` names them.
LINEARS = ("qkv", "o", "gate_up", "down")
# Large tensors, whose values are not read to check whether a checkpoint fits.
_NUMBERS = (".weight", ".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")
# Beginnings of names in models that see images -> those in their text models; None: it has none.
_TEXT_NAMES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    **{
        f"{model}{part}.": None
        for model in ("", "model.")
        for part in (
            *("vision_tower", "multi_modal_projector", "visual"),
            *("audio_tower", "embed_vision", "embed_audio"),
        )
    },
}
_PLAIN = (torch.float32, torch.float16, torch.bfloat16)

#: A weight [out, in].
Matrix = torch.Tensor | Fp8Matrix | Int4Matrix
#: Each layer's (scale of keys, scale of values) in FP8; empty: all are 1.
KvScales = tuple[tuple[float, float], ...]


def dense(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [out, in] that a product multiplies by: the weight itself, or a copy."""
    return matrix if isinstance(matrix, torch.Tensor) else matrix.dense(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer; matrices are [out, in].

    A gated delta net has its `in_proj` in the place of q, k and v. Beside experts, gate_up and down
    are those of the MLP that all tokens share, or of width 0.
    """

    attention_norm: torch.Tensor | None  # [E]
    qkv: Matrix  # [(H + 2 K) D, E]
    o: Matrix  # [E, H D]
    mlp_norm: torch.Tensor | None  # [E]
    gate_up: Matrix  # [2 I, E]
    down: Matrix  # [E, I]
    qkv_bias: torch.Tensor | None = None  # [(H + 2 K) D]
    o_bias: torch.Tensor | None = None  # [E]
    gate_up_bias: torch.Tensor | None = None  # [2 I]
    down_bias: torch.Tensor | None = None  # [E]
    qk_norm: torch.Tensor | None = None  # q, k (and v, if there is one): [2, D], or [(H + K) D]
    attention_out_norm: torch.Tensor | None = None  # [E], of what is added to the residual
    mlp_out_norm: torch.Tensor | None = None  # [E]
    sinks: torch.Tensor | None = None  # [H]
    delta: DeltaWeights | None = None
    experts: ExpertWeights | None = None
    per_layer: PerLayerGate | None = None
    scale: float = 1.0  # factor of the layer's sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of a decoder.

    may_pack   whether the decoder may keep a second copy of the matrices in its library's layout
    kv_scales  each layer's (scale of keys, scale of values) in FP8; empty: all are 1
    """

    embedding: torch.Tensor  # [V, E]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [E]
    lm_head: torch.Tensor  # [V, E]; the embedding's own tensor when they are tied
    may_pack: bool = True
    kv_scales: KvScales = ()
    per_layer: PerLayerWeights | None = None


class Watch(Protocol):
    """Sees the weights while they are loaded, so that not all have to be there twice."""

    def begin(self, embedding: torch.Tensor, kv_scales: KvScales) -> None: ...

    def follow(self, before: LayerWeights, after: LayerWeights) -> None:
        """See the next layer as it was read, and as it is served."""


class TensorSource(Protocol):
    """A model's tensors by Hugging Face name; each is taken once.

    All methods raise UnsupportedModel for a tensor that is missing or has another shape.
    """

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name that was not taken yet."""

    def load(self, name: str, *shape: int) -> torch.Tensor: ...

    def load_fp4(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor that is stored in MXFP4, in blocks along its last dimension."""

    def fuse(self, names: tuple[str, ...], heights: tuple[int, ...], width: int) -> Matrix:
        """Return linears' weights [height, width] stacked by rows: [sum of heights, width]."""

    def drop(self, suffix: str = "", prefix: str = "") -> None:
        """Ignore the tensors whose names begin and end so."""

    def check_all_taken(self) -> None:
        """Raise UnsupportedModel naming a tensor that was not taken."""


class _Place(NamedTuple):
    """A tensor in an open file."""

    handle: Any
    name: str

    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.handle.get_tensor(self.name)
        return tensor

    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())


def text_name(name: str) -> str | None:
    """Return the name of a tensor of a model with images in its text model; None: it has none."""
    for prefix, own in _TEXT_NAMES.items():
        if name.startswith(prefix):
            return own and own + name.removeprefix(prefix)
    return name


class _Checkpoint:
    """The tensors of a model folder."""

    def __init__(
        self,
        folder: Path,
        scheme: Fp8Scheme | Int4Scheme | None,
        device: str,
        dtype: torch.dtype,
        has_images: bool = False,
    ) -> None:
        self._scheme, self._device, self._dtype = scheme, device, dtype
        index_file = folder / "model.safetensors.index.json"
        try:
            if index_file.exists():
                files = sorted(set(json.loads(index_file.read_text())["weight_map"].values()))
            else:
                files = ["model.safetensors"]
            self._places: dict[str, _Place] = {}
            for file in files:
                handle: Any = safe_open(folder / file, framework="pt")
                named = ((text_name(n) if has_images else n, n) for n in handle.keys())
                self._places.update({own: _Place(handle, n) for own, n in named if own})
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UnsupportedModel(f"{folder}: cannot read the weights: {error}") from error

    def has(self, name: str) -> bool:
        return name in self._places

    def load(self, name: str, *shape: int) -> torch.Tensor:
        return self._take(name, shape).to(self._device, self._dtype)

    def load_fp4(self, name: str, *shape: int) -> torch.Tensor:
        *rows, width = shape
        places = (*rows, width // FP4_GROUP)
        blocks = self._take(f"{name}_blocks", (*places, FP4_GROUP // 2), (torch.uint8,))
        scales = self._take(f"{name}_scales", places, (torch.uint8,))
        if self._device == "meta":
            return torch.empty(shape, device="meta", dtype=self._dtype)
        return dense_fp4(blocks, scales, self._dtype).to(self._device)

    def fuse(self, names: tuple[str, ...], heights: tuple[int, ...], width: int) -> Matrix:
        modules = [name.removesuffix(".weight") for name in names]
        if self._scheme is not None:
            are_plain = {self._scheme.ignores(module) for module in modules}
            if are_plain == {False}:
                sizes = zip(modules, heights, strict=True)
                return _stacked([self._take_quantized(*each, width) for each in sizes])
            if len(are_plain) == 2:
                raise UnsupportedModel(
                    f"config.json: quantization_config ignores a part of {', '.join(modules)}, "
                    "which the decoder keeps as one matrix: ignore all or none",
                    param="quantization_config",
                )
        fused = torch.empty(sum(heights), width, device=self._device, dtype=self._dtype)
        first = 0
        for name, height in zip(names, heights, strict=True):
            fused[first : first + height].copy_(self._take(name, (height, width)))
            first += height
        return fused

    def kv_scales(self, num_layers: int) -> tuple[tuple[float, float], ...]:
        """Return `Weights.kv_scales`."""
        if self._scheme is None or not self._scheme.has_kv_scales:
            return ()
        layers = [f"model.layers.{i}.self_attn" for i in range(num_layers)]
        key, value = (
            [self._take_scale(f"{layer}.{name}", 1).item() for layer in layers]
            for name in ("k_scale", "v_scale")
        )
        return tuple(zip(key, value, strict=True))

    def drop(self, suffix: str = "", prefix: str = "") -> None:
        left = (n for n in self._places if not (n.startswith(prefix) and n.endswith(suffix)))
        self._places = {name: self._places[name] for name in left}

    def check_all_taken(self) -> None:
        if isinstance(self._scheme, Int4Scheme):  # some tools write a bias of zeros for each linear
            for name in [n for n in self._places if n.endswith("_proj.bias")]:
                if not self._places[name].tensor().any():
                    del self._places[name]
        if self._places:
            name = min(self._places)
            raise UnsupportedModel(f"the decoder has no use for tensor {name}", param=name)

    def _take(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = _PLAIN
    ) -> torch.Tensor:
        """Return the tensor as the file has it; raise UnsupportedModel unless it fits."""
        if name not in self._places:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}", param=name)
        tensor = self._places.pop(name).tensor()
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"tensor {name} has shape {list(tensor.shape)}, not {list(shape)}", param=name
            )
        if tensor.dtype not in dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise UnsupportedModel(
                f"tensor {name} is {tensor.dtype}; by config.json it has to be {known}", param=name
            )
        return tensor.to("meta") if self._device == "meta" and name.endswith(_NUMBERS) else tensor

    def _take_quantized(self, module: str, height: int, width: int) -> Fp8Matrix | Int4Matrix:
        """Return a quantised linear's weight [height, width]."""
        if isinstance(self._scheme, Int4Scheme):
            matrix = read_int4(self._scheme, module, height, width, self._take, self.has)
            return matrix.to(self._device)
        assert self._scheme is not None
        numbers = self._take(f"{module}.weight", (height, width), (FP8,))
        if not numbers.is_meta and bool((numbers.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise UnsupportedModel(f"tensor {module}.weight has NaN", param=f"{module}.weight")
        name = self._found(module, self._scheme.weight)
        if self._scheme.in_blocks:
            groups = self._take_blocks(name, height, width)
            return Fp8Matrix(numbers, torch.ones(height), groups=groups).to(self._device)
        scale = self._take_scale(name, height).expand(height).contiguous()
        inputs = None
        if self._scheme.is_static:
            inputs = self._take_scale(self._found(module, self._scheme.activation), 1)
        return Fp8Matrix(numbers, scale, inputs).to(self._device)

    def _found(self, module: str, parts: tuple[str, ...]) -> str:
        """Return the first of a module's tensors that there is; if there is none, the first."""
        names = [f"{module}.{part}" for part in parts]
        return next(filter(self.has, names), names[0])

    def _take_scale(self, name: str, height: int) -> torch.Tensor:
        """Return scales [height] or [1] fp32; those of channels may be stored as a column."""
        stored = self._places.get(name)
        shape = stored.shape() if stored is not None else ()
        if shape not in {(), (1,), (height,), (height, 1)}:
            raise UnsupportedModel(
                f"tensor {name} has shape {list(shape)}: neither one scale nor {height}",
                param=name,
            )
        return _checked(name, self._take(name, shape)).reshape(-1)

    def _take_blocks(self, name: str, height: int, width: int) -> torch.Tensor:
        """Return the scales of blocks as those of each row's groups, [height, G] fp32."""
        shape = -(-height // GROUP), -(-width // GROUP)
        blocks = _checked(name, self._take(name, shape))
        return blocks.repeat_interleave(GROUP, dim=0)[:height].contiguous()


def _checked(name: str, scale: torch.Tensor) -> torch.Tensor:
    """Return scales in fp32; raise UnsupportedModel unless all are numbers above zero."""
    scale = scale.float()
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise UnsupportedModel(
            f"tensor {name} has a scale that is not a number above zero", param=name
        )
    return scale


def _stacked(parts: list[Any]) -> Fp8Matrix | Int4Matrix:
    """Stack matrices of a kind that multiply one activation; its fixed scale is the largest."""
    if len(parts) == 1:
        only: Fp8Matrix | Int4Matrix = parts[0]
        return only
    if isinstance(parts[0], Int4Matrix):
        return Int4Matrix(
            torch.cat([part.packed for part in parts]),
            torch.cat([part.scale for part in parts], dim=1),
            torch.cat([part.zero for part in parts], dim=1),
        )
    inputs = [part.input_scale for part in parts if part.input_scale is not None]
    groups = [part.groups for part in parts if part.groups is not None]
    return Fp8Matrix(
        torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(FP8),
        torch.cat([part.scale for part in parts]),
        torch.stack(inputs).amax(dim=0) if inputs else None,
        torch.cat(groups) if groups else None,
    )


def load_weights(
    folder: Path,
    config: ModelConfig,
    device: str,
    dtype: torch.dtype,
    *,
    in_fp8: bool = False,
    watch: Watch | None = None,
) -> Weights:
    """Read the safetensors of `folder`; raise UnsupportedModel naming what does not fit.

    All names, shapes, types and scales are checked before the device is given any of them.

    in_fp8  quantise linears that the checkpoint does not have in FP8
    """
    for place, seen in (("meta", None), (device, watch)):
        checkpoint = _Checkpoint(folder, config.scheme, place, dtype, config.has_images)
        scales = checkpoint.kv_scales(config.num_layers)
        weights = build_weights(checkpoint, config, in_fp8=in_fp8, kv_scales=scales, watch=seen)
    return weights


def build_weights(
    checkpoint: TensorSource,
    config: ModelConfig,
    *,
    may_pack: bool = True,
    in_fp8: bool = False,
    kv_scales: KvScales = (),
    watch: Watch | None = None,
) -> Weights:
    """Build the decoder's weights; raise UnsupportedModel naming a tensor that does not fit."""
    hidden = config.hidden_size
    embedding, lm_head = _load_ends(checkpoint, config)
    loaded = (_load_layer(checkpoint, config, index) for index in range(config.num_layers))
    layers = as_served(embedding, loaded, kv_scales, in_fp8=in_fp8, watch=watch)
    norm = _load_norm(checkpoint, config, "model.norm", hidden)
    per_layer = _load_per_layer(checkpoint, config)
    checkpoint.drop("rotary_emb.inv_freq")  # old checkpoints carry this constant
    for prefix in config.plan.unread:
        checkpoint.drop(prefix=prefix)
    checkpoint.check_all_taken()
    return Weights(
        embedding=embedding,
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        may_pack=may_pack,
        kv_scales=kv_scales,
        per_layer=per_layer,
    )


def as_served(
    embedding: torch.Tensor,
    layers: Iterable[LayerWeights],
    kv_scales: KvScales,
    *,
    in_fp8: bool,
    watch: Watch | None,
) -> tuple[LayerWeights, ...]:
    """Return the layers, quantised if they shall be; show each to `watch`."""
    if watch is not None:
        watch.begin(embedding, kv_scales)
    served = []
    for layer in layers:
        served.append(quantized(layer) if in_fp8 else layer)
        if watch is not None:
            watch.follow(layer, served[-1])
    return tuple(served)


def quantized(layer: LayerWeights) -> LayerWeights:
    """Return the layer with its linears in FP8, a scale per output channel."""
    changed: dict[str, Any] = {}
    for name in LINEARS:
        matrix = getattr(layer, name)
        if isinstance(matrix, torch.Tensor):
            changed[name] = quantize_matrix(matrix)
    return replace(layer, **changed)


def _load_ends(checkpoint: TensorSource, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embedding and the LM head, tied as transformers 5 ties them.

    If the config ties them and the checkpoint has only one, that one is both. If it has both and
    they differ, each is used, whatever the config says.
    """
    shape = config.vocab_size, config.hidden_size
    names = "model.embed_tokens.weight", "lm_head.weight"
    if config.tie_embeddings and not all(map(checkpoint.has, names)):
        one = checkpoint.load(names[1] if checkpoint.has(names[1]) else names[0], *shape)
        return one, one
    embedding, lm_head = (checkpoint.load(name, *shape) for name in names)
    if config.tie_embeddings and not embedding.is_meta and torch.equal(embedding, lm_head):
        return embedding, embedding
    return embedding, lm_head


def _load_norm(
    checkpoint: TensorSource, config: ModelConfig, name: str, width: int
) -> torch.Tensor:
    """Return a norm's weight; where something is added to it, in fp32, so that nothing is lost."""
    weight = checkpoint.load(f"{name}.weight", width)
    offset = config.plan.norm_offset
    return weight.float() + offset if offset else weight


def _load_layer(checkpoint: TensorSource, config: ModelConfig, index: int) -> LayerWeights:
    hidden, widths = config.hidden_size, config.widths(index)
    prefix = f"model.layers.{index}"
    norms: dict[str, Any] = {}
    for place, name in config.plan.norms._asdict().items():
        norms[f"{place}_norm"] = (
            None if name is None else _load_norm(checkpoint, config, f"{prefix}.{name}", hidden)
        )

    def fuse(linears: tuple[str, ...], heights: tuple[int, ...], width: int) -> Matrix:
        names = linears
        if linears in config.fuses:
            names, heights = (FUSED[linears],), (sum(heights),)
        return checkpoint.fuse(tuple(f"{prefix}.{n}.weight" for n in names), heights, width)

    delta, has_delta = config.plan.delta, index in config.plan.delta_layers
    if delta is not None and has_delta:
        mixer: dict[str, Any] = {
            "qkv": fuse(DELTA_IN, delta.widths, hidden),
            "o": fuse((DELTA_OUT,), (hidden,), delta.value_size),
            "delta": _load_delta(checkpoint, f"{prefix}.linear_attn", delta),
        }
    else:
        there = [(name, out) for name, (_, out) in zip(QKV, widths, strict=False) if out]
        names, heights = zip(*there, strict=True)
        mixer = {
            "qkv": fuse(names, heights, hidden),
            "o": fuse(O, (hidden,), widths[3][0]),
            **_load_attention_extras(checkpoint, config, f"{prefix}.self_attn"),
        }
        if config.plan.shapes:
            mixer |= _load_shaped(checkpoint, config, index)
    experts = None
    if config.plan.experts is not None and index in config.plan.expert_layers:
        of_family = _load_biased if config.plan.experts.has_biases else _load_experts
        experts = of_family(checkpoint, f"{prefix}.mlp", hidden, config.plan.experts)
    if experts is not None and experts.shared_gate is None:
        mlp: dict[str, Any] = {
            "gate_up": experts.router.new_empty(0, hidden),
            "down": experts.router.new_empty(hidden, 0),
        }
    else:
        (gate, up, down), inner = MLP if experts is None else config.mlp, widths[6][0]
        mlp = {
            "gate_up": fuse((gate, up), (inner, inner), hidden),
            "down": fuse((down,), (hidden,), inner),
            **_load_mlp_biases(checkpoint, config, f"{prefix}.mlp"),
        }
    return LayerWeights(**mixer, **norms, **mlp, experts=experts)


def _load_experts(
    checkpoint: TensorSource, prefix: str, hidden: int, shape: ExpertShape
) -> ExpertWeights:
    """Read experts, whose matrices a checkpoint has in two tensors or one by one."""
    num, inner, experts = shape.num, shape.inner, f"{prefix}.experts"
    sizes = (num, 2 * inner, hidden), (num, hidden, inner)
    if checkpoint.has(f"{experts}.gate_up_proj"):
        stacked = zip(("gate_up", "down"), sizes, strict=True)
        stacks = [checkpoint.load(f"{experts}.{n}_proj", *size) for n, size in stacked]
    else:
        stacks = []
        for parts, size in zip((("gate", "up"), ("down",)), sizes, strict=True):
            names = (*(f"{experts}.{i}.{part}_proj.weight" for i in range(num) for part in parts),)
            matrix = checkpoint.fuse(names, (size[1] // len(parts),) * len(names), size[2])
            stacks.append(dense(matrix, torch.float32).view(size))
    shared = None
    if shape.has_shared:
        shared = checkpoint.load(f"{prefix}.shared_expert_gate.weight", 1, hidden)
    router = checkpoint.load(f"{prefix}.gate.weight", num, hidden)
    return ExpertWeights(router, stacks[0], stacks[1], shared)


def _load_biased(
    checkpoint: TensorSource, mlp: str, hidden: int, shape: ExpertShape
) -> ExpertWeights:
    """Read gpt-oss's experts: a gate's row lies before its up's, plain matrices are [in, out]."""
    num, inner, experts = shape.num, shape.inner, f"{mlp}.experts"

    def load(name: str, width_in: int, width_out: int) -> torch.Tensor:
        if shape.is_fp4:
            return checkpoint.load_fp4(f"{experts}.{name}", num, width_out, width_in)
        return checkpoint.load(f"{experts}.{name}", num, width_in, width_out).transpose(1, 2)

    def halves(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)

    return ExpertWeights(
        router=checkpoint.load(f"{mlp}.router.weight", num, hidden),
        gate_up=halves(load("gate_up_proj", hidden, 2 * inner)),
        down=load("down_proj", inner, hidden).contiguous(),
        router_bias=checkpoint.load(f"{mlp}.router.bias", num),
        gate_up_bias=halves(checkpoint.load(f"{experts}.gate_up_proj_bias", num, 2 * inner)),
        down_bias=checkpoint.load(f"{experts}.down_proj_bias", num, hidden),
    )


def _load_shaped(checkpoint: TensorSource, config: ModelConfig, index: int) -> dict[str, Any]:
    """Return what Gemma 4's layers have: norms of heads, an input of their own, a factor."""
    prefix, shape = f"model.layers.{index}", config.shape(index)
    own = ("q",) if shape.keys_of is not None else ("q", "k")
    norms = [
        _load_norm(checkpoint, config, f"{prefix}.self_attn.{name}_norm", shape.head_dim)
        for name in own
    ]
    if shape.keys_of is None:
        norms.append(torch.ones_like(norms[0]))  # values have a norm without a weight
    found: dict[str, Any] = {"qk_norm": torch.stack(norms)}
    scale = checkpoint.load(f"{prefix}.layer_scalar", 1)
    found["scale"] = 1.0 if scale.is_meta else scale.item()
    if config.plan.per_layer is not None:
        hidden, (_, width) = config.hidden_size, config.plan.per_layer
        found["per_layer"] = PerLayerGate(
            gate=checkpoint.load(f"{prefix}.per_layer_input_gate.weight", width, hidden),
            projection=checkpoint.load(f"{prefix}.per_layer_projection.weight", hidden, width),
            norm=_load_norm(checkpoint, config, f"{prefix}.post_per_layer_input_norm", hidden),
        )
    return found


def _load_per_layer(checkpoint: TensorSource, config: ModelConfig) -> PerLayerWeights | None:
    if config.plan.per_layer is None:
        return None
    vocabulary, width = config.plan.per_layer
    rows = config.num_layers * width
    return PerLayerWeights(
        embedding=checkpoint.load("model.embed_tokens_per_layer.weight", vocabulary, rows),
        projection=checkpoint.load(
            "model.per_layer_model_projection.weight", rows, config.hidden_size
        ),
        norm=_load_norm(checkpoint, config, "model.per_layer_projection_norm", width),
    )


def _load_delta(checkpoint: TensorSource, prefix: str, shape: DeltaShape) -> DeltaWeights:
    channels, heads = shape.widths[0], shape.num_values
    return DeltaWeights(
        convolution=checkpoint.load(f"{prefix}.conv1d.weight", channels, 1, shape.kernel)[:, 0],
        rate=checkpoint.load(f"{prefix}.A_log", heads),
        shift=checkpoint.load(f"{prefix}.dt_bias", heads),
        norm=checkpoint.load(f"{prefix}.norm.weight", shape.value_dim),
    )


def _load_mlp_biases(checkpoint: TensorSource, config: ModelConfig, mlp: str) -> dict[str, Any]:
    if not config.mlp_bias:
        return {}
    inner = config.intermediate_size
    biases = [checkpoint.load(f"{mlp}.{name}_proj.bias", inner) for name in ("gate", "up")]
    down = checkpoint.load(f"{mlp}.down_proj.bias", config.hidden_size)
    return {"gate_up_bias": torch.cat(biases), "down_bias": down}


def _load_attention_extras(
    checkpoint: TensorSource, config: ModelConfig, attention: str
) -> dict[str, torch.Tensor]:
    """Return the biases, the norms of q and k, and the sinks, which only some models have."""
    hidden, head = config.hidden_size, config.head_dim
    extras = {}
    if config.qkv_bias:
        sizes = {"q": config.q_rows, "k": config.kv_size, "v": config.kv_size}
        biases = [checkpoint.load(f"{attention}.{n}_proj.bias", size) for n, size in sizes.items()]
        extras["qkv_bias"] = torch.cat(biases)
    if config.o_bias:
        extras["o_bias"] = checkpoint.load(f"{attention}.o_proj.bias", hidden)
    if config.plan.has_sinks:
        extras["sinks"] = checkpoint.load(f"{attention}.sinks", config.num_heads)
    if config.plan.qk_norm is not None and not config.plan.shapes:
        is_whole = config.plan.qk_norm == "all"
        widths = (config.q_size, config.kv_size) if is_whole else (head, head)
        norms = [
            _load_norm(checkpoint, config, f"{attention}.{name}_norm", width)
            for name, width in zip("qk", widths, strict=True)
        ]
        extras["qk_norm"] = torch.cat(norms) if is_whole else torch.stack(norms)
    return extras
