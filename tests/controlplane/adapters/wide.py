"""An adapter of some megabytes, for a base model that is wide and has few layers."""

from __future__ import annotations

import math
import struct

from contract.adapters.base_shape import BaseShape
from tests.controlplane.adapters.files import Tensors, config_bytes, pack
from tests.controlplane.conftest import TINY_CONFIG

#: 14 MiB of weights for each two layers.
WIDE_CONFIG = {**TINY_CONFIG, "hidden_size": 2048, "head_dim": 512}
CONFIG_BYTES = config_bytes(r=256, target_modules=["q_proj", "v_proj"])


def wide_base(layers: int = 2) -> dict[str, object]:
    """The base model's config.json."""
    return {**WIDE_CONFIG, "num_hidden_layers": layers}


def wide_tensors(layers: int = 2) -> bytes:
    """adapter_model.safetensors; no two of its tensors are the same."""
    found: Tensors = {}
    for path, _, (width_in, width_out) in BaseShape.from_config(wide_base(layers)).modules():
        if path.endswith(("q_proj", "v_proj")):
            for part, shape in (("A", (256, width_in)), ("B", (width_out, 256))):
                data = struct.pack("<f", 1 / (1 + len(found))) * math.prod(shape)
                name = f"base_model.model.{path}.lora_{part}.weight"
                found[name] = ("F32", shape, data)
    return pack(found)
