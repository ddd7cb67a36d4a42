"""Map the names of an adapter's tensors to modules and to their parts.

A name is the path that the tensor has in PEFT's model: PEFT ignores any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from contract.adapters.base_shape import EMBEDDING
from contract.adapters.file_kinds import MLX_ADAPTER

PREFIX = "base_model.model."
# Parts of a module: LoRA's tensors, a whole matrix, and some of its rows.
MAGNITUDE, BIAS = "lora_magnitude_vector", "lora_B.bias"
MATRIX, ROWS = "weight", "token_adapter.trainable_tokens_delta"
# Tensors that PEFT repeats: the base's own matrix, under four names, and matrices that it saved
# whole.
BESIDE_LORA, BESIDE_ROWS = "base_layer.weight", "token_adapter.base_layer.weight"
BESIDE_SAVED, SAVED_AGAIN = "original_module.weight", "modules_to_save.weight"
WHOLE = (MATRIX, BESIDE_LORA, BESIDE_ROWS, BESIDE_SAVED, SAVED_AGAIN)
Key = tuple[str, str]  # (a module's dotted path, which of its tensors)

_MODULE = (
    r"(?P<module>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\."
    r"(?:(?:self_attn|linear_attn|mlp(?:\.shared_expert)?)\.(?!experts\.)[a-z_]+"
    r"|mlp\.experts\.(?:0|[1-9][0-9]{0,3})\.[a-z_]+|mlp\.experts(?:\.base_layer)?)"
    r"|model\.embed_tokens|lm_head)"
)
_TENSOR_NAME = re.compile(
    rf"{re.escape(PREFIX)}{_MODULE}\."
    r"(?:(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?P<adapter>\.default)?(?P<leaf>\.weight|\.bias|)"
    rf"|(?P<rows>{re.escape(ROWS)})"
    r"|(?P<saved>modules_to_save)(?:\.default)?\.weight"
    r"|(?P<whole>(?:base_layer\.|token_adapter\.base_layer\.|original_module\.)?weight))",
    re.ASCII,
)
_MODULE_BEGIN = re.compile(r"(?:model\.)?(?:layers\.[0-9]|embed_tokens\.)|lm_head\.", re.ASCII)


def matrices(module: str) -> tuple[str, str]:
    """Return PEFT's names of a module's A and B."""
    if module == EMBEDDING:
        return "lora_embedding_A", "lora_embedding_B"
    return "lora_A.weight", "lora_B.weight"


#: The ways in which versions of PEFT's models spell the text model of one that sees images.
TEXT_MODELS = ("model.language_model.", "language_model.model.")


def spelling_of(names: Iterable[str]) -> str:
    """Return which of TEXT_MODELS the names have; empty: none."""
    heads = [name.removeprefix(PREFIX) for name in names]
    return next((way for way in TEXT_MODELS if any(h.startswith(way) for h in heads)), "")


def plain(name: str, way: str) -> str:
    """Return a name or a module as it would be without images.

    way  of TEXT_MODELS
    """
    prefix = PREFIX if name.startswith(PREFIX) else ""
    rest = name.removeprefix(prefix)
    if way == TEXT_MODELS[1] and rest.startswith("language_model.lm_head"):
        return prefix + rest.removeprefix("language_model.")
    return f"{prefix}model.{rest.removeprefix(way)}" if way and rest.startswith(way) else name


def spelled(module: str, way: str) -> str:
    """Return what `plain` makes `module` of."""
    if not way:
        return module
    if module.startswith("model."):
        return way + module.removeprefix("model.")
    return f"language_model.{module}" if way == TEXT_MODELS[1] else module


def key_of(name: str) -> Key | None:
    """Return the module and the part that a name means; None if it is not an adapter's name."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    module, part = match["module"], match["part"]
    if part is None:
        whole = ROWS if match["rows"] else SAVED_AGAIN if match["saved"] else match["whole"]
        return None if match["layer"] else (module, whole)
    if part == MAGNITUDE:  # ".weight" depends on PEFT's version, but never follows ".default"
        is_known = match["leaf"] == ".weight" or not (match["leaf"] or match["adapter"])
        return (module, part) if is_known else None
    part += match["leaf"]
    known = (*matrices(module), *([] if module == EMBEDDING else [BIAS]))
    return (module, part) if part in known else None


def name_problem(name: str) -> str:
    """Return why a name that means no tensor is refused."""
    begin = _MODULE_BEGIN.search(name)
    if begin is not None:
        tail = name[begin.start() :]
        inner = "model." if tail.startswith(("layers", "embed_tokens")) else ""
        for right in (f"{PREFIX}{inner}{tail}", f"{PREFIX}{inner}{tail}".replace(".default", "")):
            if key_of(right) is not None:
                return f"PEFT does not read a tensor of this name: rename it to {right}"
    if name.endswith((".lora_a", ".lora_b")):
        return MLX_ADAPTER
    return "it is not a tensor of LoRA or DoRA of a module that can be adapted: leave it out"
