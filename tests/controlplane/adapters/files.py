"""Adapter files for the tests: right ones, and each way of being wrong."""

from __future__ import annotations

import json
import math
import random
import struct
import urllib.error
import urllib.request
from typing import Any

from contract.adapters.base_shape import BaseShape
from tests.controlplane.conftest import TINY_CONFIG

BASE = BaseShape.from_config(TINY_CONFIG)
TARGETS = ("q_proj", "v_proj", "down_proj")

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def config(**fields: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(TARGETS),
        **fields,
    }


def config_bytes(**fields: Any) -> bytes:
    return json.dumps(config(**fields)).encode()


def tensors(
    rank: int = 4,
    targets: tuple[str, ...] = TARGETS,
    layers: int = 2,
    *,
    dora: bool = False,
    bias: bool = False,
) -> Tensors:
    """The tensors in F32 of each target in each of the tiny base's first layers.

    targets  names of linears; embed_tokens and lm_head beside them
    """
    noise = random.Random(0)
    found: Tensors = {}
    for path, layer, (width_in, width_out) in BASE.modules():
        if path.split(".")[-1] not in targets or (layer is not None and layer >= layers):
            continue
        is_embedding = path.endswith("embed_tokens")
        shapes: dict[str, tuple[int, ...]] = {
            "lora_embedding_A" if is_embedding else "lora_A.weight": (rank, width_in),
            "lora_embedding_B" if is_embedding else "lora_B.weight": (width_out, rank),
        }
        if bias:
            shapes["lora_B.bias"] = (width_out,)
        if dora:
            shapes["lora_magnitude_vector"] = (width_out,)
        for part, shape in shapes.items():
            values = [noise.uniform(-1, 1) for _ in range(math.prod(shape))]
            data = struct.pack(f"<{len(values)}f", *values)
            found[f"base_model.model.{path}.{part}"] = ("F32", shape, data)
    return found


def header(found: Tensors) -> dict[str, Any]:
    """The header of a file of these tensors; tests spoil it before packing."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in found.items():
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    return entries


def pack(found: Tensors, entries: dict[str, Any] | None = None) -> bytes:
    """The safetensors file of these tensors, under their own header or a spoiled one."""
    text = json.dumps(header(found) if entries is None else entries).encode()
    return pack_text(text, b"".join(data for _, _, data in found.values()))


def pack_text(header_text: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header_text)) + header_text + data


GOOD_CONFIG, GOOD_TENSORS = config_bytes(), pack(tensors())


def put(url: str, data: bytes, headers: dict[str, str] | None = None) -> int:
    """The status of the store's answer."""
    request = urllib.request.Request(url, data=data, method="PUT", headers=headers or {})
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
