"""Does an uploaded adapter fit its base model? Pure functions over bytes.

The engine asks the same when it loads an adapter and refuses nothing that passes here; asked at
upload, the answer reaches the person who can change something.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from controlplane.adapters import new_rows, peft_config, tensor_file
from controlplane.adapters.new_rows import EMBEDDING, HEAD, MATRIX, ROWS
from controlplane.adapters.peft_config import AdaptedModules, LoraConfig
from controlplane.adapters.rejection import Reason, Rejected, shown
from controlplane.adapters.tensor_file import Tensor

_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\."
    r"(?P<linear>(?:self_attn|mlp)\.[a-z_]+)|model\.embed_tokens|lm_head)\."
    r"(?:(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?P<leaf>\.weight|\.bias|)|(?P<rows>token_adapter\.trainable_tokens_delta)"
    r"(?:\.default)?|(?P<base>base_layer\.)?weight)",
    re.ASCII,
)
# PEFT repeats the base's matrix beside an adapted embedding or head. Whether it is the base's is
# seen where the base is.
_COPY = "copy"
_QWEN3_HEAD_DIM = 128
Shape = tuple[int, ...]
Key = tuple[str, str]  # (a module's dotted path, which of its tensors)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape:
    """The matrices of a Llama-shaped base model that an adapter may change.

    linears          self_attn.q_proj … mlp.down_proj -> (in, out)
    hidden, vocab    sizes of the embedding and of the last matrix
    is_tied          those two are one
    biased           the linears that add a bias
    """

    num_layers: int
    linears: Mapping[str, tuple[int, int]]
    hidden: int
    vocab: int
    is_tied: bool
    biased: frozenset[str] = frozenset()

    def modules(self) -> Iterator[tuple[str, int | None, tuple[int, int]]]:
        """Each one's dotted path, its layer if it is of one, and (in, out)."""
        yield EMBEDDING, None, (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            for linear, widths in self.linears.items():
                yield f"model.layers.{layer}.{linear}", layer, widths
        yield HEAD, None, (self.hidden, self.vocab)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BaseShape:
        """From a Hugging Face config.json. Raises ValueError naming the field that is wrong."""
        hidden = _size(config, "hidden_size")
        inner = _size(config, "intermediate_size")
        num_heads = _size(config, "num_attention_heads")
        family = config.get("model_type")
        # What a config leaves out is what it is to transformers, and so to the engine.
        default = _QWEN3_HEAD_DIM if family == "qwen3" else hidden // num_heads
        head_dim = _size(config, "head_dim", default)
        queries = num_heads * head_dim
        keys = _size(config, "num_key_value_heads", num_heads) * head_dim
        return cls(
            num_layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            vocab=_size(config, "vocab_size"),
            is_tied=bool(config.get("tie_word_embeddings")),
            biased=_biased(config),
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


def _biased(config: Mapping[str, Any]) -> frozenset[str]:
    names: set[str] = set()
    if config.get("attention_bias") or config.get("model_type") == "qwen2":
        names |= {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    if config.get("attention_bias"):
        names.add("self_attn.o_proj")
    if config.get("mlp_bias"):
        names |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    return frozenset(names)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAdapter:
    """An adapter whose config and header fit its base; its values are not looked at yet."""

    config: LoraConfig
    tensors: tuple[Tensor, ...]

    @property
    def ranks(self) -> set[int]:
        """Of every matrix A."""
        found = set()
        for tensor in self.tensors:
            key = _key(tensor.name)
            if key is not None and key[1] in ("lora_A.weight", "lora_embedding_A"):
                found.add(tensor.shape[0])
        return found

    def report(self) -> dict[str, Any]:
        """Facts for the version's page."""
        own, modules = [], set()
        for tensor in self.tensors:
            key = _key(tensor.name)
            is_copy = key is None or key[1] == _COPY
            if key is not None and key[1] == MATRIX:
                is_copy = key[0] not in self.config.rows.saved
            if key is not None and not is_copy:
                own.append(tensor)
                modules.add(key[0].split(".")[-1])
        raw = self.config.raw
        return {
            "target_modules": sorted(modules),
            "ranks": sorted(self.ranks),
            "alpha": self.config.alpha,
            "use_rslora": self.config.use_rslora,
            "use_dora": self.config.use_dora,
            "dtypes": sorted({tensor.dtype for tensor in own}),
            "num_tensors": len(own),
            "num_parameters": sum(math.prod(tensor.shape) for tensor in own),
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
    expected: dict[Key, Shape] = {}
    is_tied = lora.ensure_weight_tying and base.is_tied
    try:
        adapted = lora.over({module: layer for module, layer, _ in base.modules()})
    except Rejected as rejected:
        return list(rejected.reasons)
    reasons = _unknown_targets(lora, adapted, base) + _trained_biases(lora, adapted, base)
    rows = new_rows.fit(
        lora.rows,
        vocab=base.vocab,
        hidden=base.hidden,
        is_tied=base.is_tied,
        ensures_tying=lora.ensure_weight_tying,
        use_dora=lora.use_dora,
        reasons=reasons,
    )
    for module, _, widths in base.modules():
        # PEFT takes a tied head out of target_modules: it goes where the embedding goes.
        named = EMBEDDING if is_tied and module == HEAD else module
        if module in rows.saved or named not in adapted.targets:
            continue
        expected.update(_expected(lora, adapted.rank_of(module), module, widths))
        if module in rows.unadapted:
            message = f"it adapts {module}, whose rows trainable_token_indices replaces"
            reasons.append(Reason("target_modules", message))
    if not expected:
        reasons.append(Reason("target_modules", "nothing is adapted: name a module to adapt"))
    if lora.lora_bias and (EMBEDDING, "lora_embedding_A") in expected:
        reasons.append(Reason("lora_bias", "it is not supported for embed_tokens"))
    copied = {module for module in (EMBEDDING, HEAD) if not _has_rows(module, rows.shapes)}
    copies = {(m, part): (base.vocab, base.hidden) for m in copied for part in (_COPY, MATRIX)}
    expected.update(rows.shapes)
    found: set[Key] = set()
    for tensor in tensors:
        key = _key(tensor.name)
        shape = None if key is None else expected.pop(key, copies.get(key))
        if key is None or shape is None:
            reasons.append(Reason(shown(tensor.name), _why_unexpected(tensor.name, base, found)))
        elif tensor.shape != shape:
            message = f"its shape is {list(tensor.shape)}; the base model and the rank need"
            reasons.append(Reason(tensor.name, f"{message} {list(shape)}"))
        if key is not None:
            found.add(key)
    reasons += [
        Reason(
            f"base_model.model.{module}.{'token_adapter.' * (part == ROWS)}{part}",
            "it is missing: adapter_config.json asks for it",
        )
        for module, part in expected
    ]
    return reasons


def _has_rows(module: str, shapes: Mapping[Key, Shape]) -> bool:
    return (module, MATRIX) in shapes or (module, ROWS) in shapes


def _trained_biases(lora: LoraConfig, adapted: AdaptedModules, base: BaseShape) -> list[Reason]:
    """Why `bias` cannot be honoured: biases of the base itself were trained. Without them: fine."""
    for module, layer, _ in base.modules():
        is_trained = lora.bias == "all" or (lora.bias == "lora_only" and module in adapted.targets)
        if is_trained and layer is not None and module.split(".", 3)[3] in base.biased:
            message = f"it is {lora.bias}, and the base's {module} has a bias: train with bias none"
            return [Reason("bias", message)]
    return []


def _expected(
    lora: LoraConfig, rank: int, module: str, widths: tuple[int, int]
) -> dict[Key, Shape]:
    """The tensors of an adapted module, and their shapes."""
    width_in, width_out = widths
    a, b = "lora_A.weight", "lora_B.weight"
    if module == EMBEDDING:
        a, b = "lora_embedding_A", "lora_embedding_B"
    found: dict[Key, Shape] = {(module, a): (rank, width_in), (module, b): (width_out, rank)}
    if lora.use_dora:
        found[module, "lora_magnitude_vector"] = (width_out,)
    if lora.lora_bias:
        found[module, "lora_B.bias"] = (width_out,)
    return found


def _unknown_targets(lora: LoraConfig, adapted: AdaptedModules, base: BaseShape) -> list[Reason]:
    modules = [module for module, _, _ in base.modules()]
    known = ", ".join(dict.fromkeys(module.split(".")[-1] for module in modules))
    unknown = [
        name for name in lora.target_names if not any(f".{m}".endswith(f".{name}") for m in modules)
    ]
    messages = [f"{shown(name)} is no module that can be adapted" for name in unknown]
    if not messages and not adapted.targets:
        messages = ["of what it names and exclude_modules leaves, nothing can be adapted"]
    return [Reason("target_modules", f"{message}; these can: {known}") for message in messages]


def _why_unexpected(name: str, base: BaseShape, found: set[Key]) -> str:
    match = _TENSOR_NAME.fullmatch(name)
    key = _key(name)
    if match is None or key is None:
        return "it is not a tensor of LoRA or DoRA of a module that can be adapted"
    if key[1] == ROWS and key not in found:
        return "trainable_token_indices does not name its module"
    if key in found:
        return "it is there twice, under two names"
    if match["layer"] is not None and int(match["layer"]) >= base.num_layers:
        return f"the base model has {base.num_layers} layers, 0 to {base.num_layers - 1}"
    if match["linear"] is not None and match["linear"] not in base.linears:
        return f"the base model has no linear {shown(match['linear'])}"
    if key[1] == "lora_magnitude_vector":
        return "adapter_config.json does not name its module, or use_dora is off"
    if key[1] == "lora_B.bias":
        return "adapter_config.json does not name its module, or lora_bias is off"
    return "adapter_config.json does not name its module"


def _key(name: str) -> Key | None:
    """The module and the tensor of it that is meant; None: it cannot be an adapter's."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    module, part = match["module"], match["part"]
    if part is None:
        whole = ROWS if match["rows"] else _COPY if match["base"] else MATRIX
        return None if match["layer"] else (module, whole)
    if part == "lora_magnitude_vector":  # ".weight" comes and goes with PEFT's version
        return None if match["leaf"] == ".bias" else (module, part)
    part += match["leaf"]
    if module == EMBEDDING:
        is_known = part in ("lora_embedding_A", "lora_embedding_B")
    else:
        is_known = part in ("lora_A.weight", "lora_B.weight", "lora_B.bias")
    return (module, part) if is_known else None


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}, not a size")
    return value
