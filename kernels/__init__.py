"""The operations of a decoder with many LoRA adapters: functions from tensors to tensors.

They know nothing of requests, tenants or adapters' names. Each file has, in this order and with the
same argument names, a reference (`_ref`), a Triton kernel and its launcher. The kernel is tested
against the reference, which also runs on a CPU.

Letters used in shapes everywhere in Lorikeet:

    T tokens in the batch     S requests in the batch     L layers
    E hidden size             I intermediate size         V vocabulary
    H query heads             K key/value heads           D head dimension
    P pages in the arena      B tokens per page           R rank
    A virtual adapters        G segments                  N tile entries
"""

from kernels.attention import paged_attention
from kernels.kv_pages import PageLayout
from kernels.lora.adjust import lora_adjust
from kernels.lora.apply import lora_expand, lora_shrink
from kernels.lora.table import (
    NUM_PROJECTIONS,
    TILE_ROWS,
    AdjustTable,
    Blocks,
    ExtraSegment,
    LoraBatch,
    LoraExtras,
    LoraTable,
    NewRows,
    Projection,
    RowTable,
    VocabPart,
)
from kernels.mask_logits import apply_bitmask
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope_kv_write
from kernels.sampling import advance, greedy
from kernels.silu_mul import silu_mul

__all__ = [
    "NUM_PROJECTIONS",
    "TILE_ROWS",
    "AdjustTable",
    "Blocks",
    "ExtraSegment",
    "LoraBatch",
    "LoraExtras",
    "LoraTable",
    "NewRows",
    "PageLayout",
    "Projection",
    "RowTable",
    "VocabPart",
    "add_rms_norm",
    "advance",
    "apply_bitmask",
    "greedy",
    "lora_adjust",
    "lora_expand",
    "lora_shrink",
    "paged_attention",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
]
