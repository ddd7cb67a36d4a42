"""The facts of each model family that an adapter has to fit, read without torch.

`engine.model.families` has a file for each, with the rest; both know the same names. What a
config.json leaves out is what it is to transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
O = ("self_attn.o_proj",)  # noqa: E741
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
#: The MLP through which all tokens go, beside routed experts.
SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")
#: Linears of a gated delta net, which some layers have in the place of attention.
DELTA_OUT = "linear_attn.out_proj"
DELTA_IN = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
#: Fields of config.json behind "linear_" -> what they are where it does not say.
DELTA_SIZES = {
    "num_key_heads": 16,
    "num_value_heads": 32,
    "key_head_dim": 128,
    "value_head_dim": 128,
    "conv_kernel_dim": 4,
}
#: Name of such a layer in `layer_types`.
DELTA = "linear_attention"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Linears that add a bias, if a field of config.json says so.

    field  None: they always do
    """

    linears: tuple[str, ...]
    field: str | None = None
    default: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one family; a field that is not set is as in Llama.

    head_dim  the width of a head where config.json has none; None: hidden size / heads
    is_tied   whether the embedding is the last matrix, too, where config.json does not say
    defaults  of fields that a text_config may leave out
    fuses     linears that the family has as one, side by side: QKV, or gate and up
    is_gated  whether q_proj has a gate beside each head's q
    has_image_names  whether checkpoints and adapters may have the names of the model with images
    mlp       the linears of a layer's MLP that adapters may change; none of routed experts
    inner     the field of config.json with that MLP's width
    delta_interval  every such layer has attention and the others have a gated delta net, where
              config.json does not say; None: all have attention
    experts   their number in a layer and their width, where config.json has none; None: there are
              none
    calls     the forms in which its models may write calls of tools, see `engine.text.call_formats`
    has_shapes  whether layers have several shapes, as `contract.layer_shapes` says
    """

    head_dim: int | None = None
    is_tied: bool = False
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fuses: tuple[tuple[str, ...], ...] = ()
    is_gated: bool = False
    has_image_names: bool = False
    mlp: tuple[str, ...] = MLP
    inner: str = "intermediate_size"
    delta_interval: int | None = None
    experts: tuple[int, int] | None = None
    calls: tuple[str, ...] = ()
    has_shapes: bool = False
    biases: tuple[Bias, ...] = ()

    def expert_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the layers that have experts in the place of one MLP. Raises ValueError."""
        step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers") or []
        step = 1 if step is None else step
        if type(step) is not int or step < 1:
            raise ValueError(f"decoder_sparse_step is {step!r}, not a number of layers")
        if not isinstance(dense, list):
            raise ValueError(f"mlp_only_layers is {dense!r}, not a list of layers")
        layers = range(config["num_hidden_layers"] if self.experts is not None else 0)
        return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)

    def delta_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the layers that have a gated delta net. Raises ValueError for other types."""
        if self.delta_interval is None:
            return ()
        layers, types = range(config["num_hidden_layers"]), config.get("layer_types")
        if types is None:
            interval = config.get("full_attention_interval") or self.delta_interval
            if type(interval) is not int or interval < 1:
                raise ValueError(f"full_attention_interval is {interval!r}, not a size")
            return tuple(i for i in layers if (i + 1) % interval)
        known = DELTA, "full_attention"
        is_list = isinstance(types, list) and len(types) == len(layers)
        if not is_list or not all(each in known for each in types):
            raise ValueError(f"layer_types is not a list with {' or '.join(known)} for each layer")
        return tuple(i for i in layers if types[i] == DELTA)

    def biased(self, config: Mapping[str, Any]) -> frozenset[str]:
        """Return the linears that add a bias."""
        found: list[str] = []
        for bias in self.biases:
            given = None if bias.field is None else config.get(bias.field)
            if bias.field is None or (bias.default if given is None else given):
                found += bias.linears
        return frozenset(found)


GATE_UP = MLP[:2]
#: The matrices of all experts of a layer, stacked: gate and up side by side, and down.
STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
#: The module that such linears are.
FUSED = {QKV: "self_attn.qkv_proj", GATE_UP: "mlp.gate_up_proj"}

_ATTENTION = Bias(linears=QKV + O, field="attention_bias")
_MISTRAL = ("mistral_args", "mistral_3", "mistral")
_QWEN = ("qwen3_5",)
_MLP = Bias(linears=MLP, field="mlp_bias")

#: model_type -> its facts
FAMILIES = {
    "llama": Facts(calls=("llama",), biases=(_ATTENTION, _MLP)),
    "mistral": Facts(calls=_MISTRAL),
    "qwen2": Facts(biases=(Bias(linears=QKV),)),
    "qwen3": Facts(head_dim=128, biases=(_ATTENTION,)),
    "smollm3": Facts(is_tied=True, biases=(_ATTENTION, _MLP)),
    "granite": Facts(calls=("granite",), biases=(_ATTENTION, _MLP)),
    "phi3": Facts(fuses=(QKV, GATE_UP)),
    "olmo2": Facts(biases=(_ATTENTION,)),
    "gemma3_text": Facts(
        head_dim=256,
        is_tied=True,
        biases=(_ATTENTION,),
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "seed_oss": Facts(
        head_dim=128,
        biases=(
            Bias(linears=QKV, field="attention_bias", default=True),
            Bias(linears=O, field="attention_out_bias"),
            _MLP,
        ),
    ),
    "ministral3": Facts(head_dim=128, calls=_MISTRAL),
    "exaone4": Facts(),
    "glm4": Facts(
        head_dim=128,
        calls=("glm4",),
        biases=(Bias(linears=QKV, field="attention_bias", default=True),),
        fuses=(GATE_UP,),
    ),
    "olmo3": Facts(biases=(_ATTENTION,)),
    "cohere2": Facts(is_tied=True, biases=(_ATTENTION,)),
    "qwen3_5_text": Facts(
        head_dim=256,
        is_gated=True,
        has_image_names=True,
        delta_interval=4,
        calls=_QWEN,
        biases=(_ATTENTION,),
        defaults={
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
    ),
    "qwen3_moe": Facts(mlp=(), calls=_QWEN, experts=(128, 768), biases=(_ATTENTION,)),
    "gemma4_text": Facts(
        head_dim=256,
        is_tied=True,
        has_image_names=True,
        calls=("gemma4",),
        has_shapes=True,
        defaults={
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "gpt_oss": Facts(
        head_dim=64,
        mlp=(),
        biases=(Bias(linears=QKV + O, field="attention_bias", default=True),),
    ),
    "qwen3_5_moe_text": Facts(
        head_dim=256,
        is_gated=True,
        has_image_names=True,
        delta_interval=4,
        calls=_QWEN,
        mlp=SHARED,
        inner="shared_expert_intermediate_size",
        experts=(256, 512),
        biases=(_ATTENTION,),
        defaults={
            "vocab_size": 248320,
            "hidden_size": 2048,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
    ),
}

#: model_type of a model that sees images -> that of its text model where text_config does not say.
WITH_IMAGES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# Those of these whose last matrix is the embedding only where config.json says so.
_UNTIED = ("qwen3_5", "qwen3_5_moe")


def has_images(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model that sees images, whose text model is served."""
    family = config.get("model_type")
    return isinstance(family, str) and family in WITH_IMAGES


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model alone. Raises ValueError if there is none."""
    if not has_images(config):
        return config
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError("text_config is not an object")
    inner = {"model_type": WITH_IMAGES[config["model_type"]], **inner}
    # The last matrix is the whole model's, and so is what it is tied to.
    is_tied = config.get("tie_word_embeddings", config["model_type"] not in _UNTIED)
    return {**facts_of(inner).defaults, **inner, "tie_word_embeddings": is_tied}


def facts_of(config: Mapping[str, Any]) -> Facts:
    """Return the facts of a config.json's family. Raises ValueError for a family not known."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type is {family!r}; these are known: {', '.join(FAMILIES)}")
    return FAMILIES[family]
