"""The division of free memory between the runs' parameters and a micro-batch's activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import OutOfMemory
from engine.model.config import ModelConfig
from engine.model.weights import LINEARS, LayerWeights
from engine.training.parameters import AdapterLayout
from engine.training.run import RunSettings
from kernels.fp8 import Fp8Matrix
from kernels.int4 import Int4Matrix
from kernels.training import SPAN
from kernels.training.cross_entropy import CHUNK
from kernels.training.pools import RANK_BLOCK

# A chunk's logits: in the model's type, and twice in float32 while the loss is computed.
_LOGIT_COPIES_FP32 = 2
# Share of the memory that is left for uncounted uses: the allocator's gaps, short-lived products.
_RESERVE = 0.1
# Numbers that a head of a gated delta net keeps of a token in tables of its chunk.
_DELTA_TABLES = 4 * 64
# The pools' smallest share of the memory that stays free if every layer is computed again.
_LEAST_POOL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """pool_elements   for `TrainerConfig`
    num_recomputed  for `TrainingModel`
    """

    pool_elements: int
    num_recomputed: int


def bytes_per_element(dtype: torch.dtype) -> int:
    """Return the bytes of an element in all pools; in float32 the masters are the values, too."""
    return 16 if dtype == torch.float32 else 16 + dtype.itemsize


def input_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes that a layer always keeps of a token: inputs of its halves, rank rows."""
    norms = config.plan.norms
    outputs = (norms.attention_out is not None) + (norms.mlp_out is not None)
    return dtype.itemsize * ((2 + outputs) * config.hidden_size + 7 * RANK_BLOCK)


def kept_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the further bytes of a token in a layer that is not computed again."""
    plan, heads, keys = config.plan, config.q_size, config.kv_size
    if plan.shapes:  # the largest layer's
        heads, keys = (
            max(w[i][1] for w in map(config.widths, range(config.num_layers))) for i in (0, 1)
        )
    rotated = heads + keys
    kept = rotated + keys + heads + (plan.qk_norm is not None) * rotated
    kept += 2 * heads * plan.is_gated
    mixer = dtype.itemsize * kept + 4 * config.num_heads
    if plan.delta is not None:  # its graph: each stage in float32, and a chunk's tables
        mixed, values = plan.delta.widths[:2]
        mixer = max(mixer, 4 * (6 * mixed + 6 * values + _DELTA_TABLES * plan.delta.num_values))
    mlp, experts = 2 * config.intermediate_size, plan.experts
    if experts is not None:  # autograd's graph, of each expert that a token goes through
        mlp += experts.chosen * (3 * experts.inner + config.hidden_size) + 2 * experts.num
    return mixer + dtype.itemsize * mlp


def dense_bytes(layers: Sequence[LayerWeights], dtype: torch.dtype) -> int:
    """Return the most bytes that one product takes for a quantised weight made dense, on a GPU.

    A weight in FP8 becomes `dtype` by two matrices in fp32, with scales of blocks by three.
    """
    found = [0]
    for layer in layers:
        for name in LINEARS:
            matrix = getattr(layer, name)
            if isinstance(matrix, Fp8Matrix):
                found.append(matrix.shape.numel() * (8 if matrix.groups is None else 12))
            elif isinstance(matrix, Int4Matrix):
                found.append(matrix.shape.numel() * dtype.itemsize)
    return max(found)


def plan_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    free_bytes: int,
    token_budget: int,
    wanted_elements: int,
    least_elements: int,
    later_elements: int = 0,
    dense_bytes: int = 0,
) -> MemoryPlan:
    """Divide `free_bytes`: room for the wanted runs, then as little recomputed as fits.

    wanted_elements  parameters of all runs that are to take part together
    least_elements   of the largest; raises OutOfMemory when there is no room for it
    later_elements   of runs that may come later: they get of what is left then
    dense_bytes      what a product with a quantised base takes, see `dense_bytes`
    """
    element = bytes_per_element(dtype)
    layer = kept_bytes(config, dtype) * token_budget
    inputs = config.num_layers * input_bytes(config, dtype) * token_budget
    logits = min(CHUNK, token_budget) * config.vocab_size
    logits *= dtype.itemsize + 4 * _LOGIT_COPIES_FP32
    usable = int(free_bytes * (1 - _RESERVE)) - inputs - logits - 2 * layer
    usable -= dense_bytes
    if usable < least_elements * element:
        raise OutOfMemory(
            f"{free_bytes >> 20} MiB are free; a run of {least_elements} parameters and "
            f"{token_budget} tokens need {(least_elements * element - usable) >> 20} MiB more"
        )
    share = max(int(usable * _LEAST_POOL_SHARE), least_elements * element)
    pool = min(wanted_elements, share // element) // SPAN * SPAN
    kept_layers = min((usable - pool * element) // layer, config.num_layers)
    left = (usable - pool * element - kept_layers * layer) // element
    pool += min(later_elements, left) // SPAN * SPAN
    return MemoryPlan(pool, config.num_layers - kept_layers)


def elements_of(config: ModelConfig, settings: RunSettings) -> int:
    """Elements of each pool that a run takes."""
    return AdapterLayout(config, settings).size
