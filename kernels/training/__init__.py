"""The operations of a decoder's training step over the packed tokens of many runs.

Tensors in, tensors out. Base weights are frozen; each run has its own adapter. Every operation is a
torch.autograd.Function whose obvious form is in reference.py.

Letters used in shapes, beside those of `kernels`: T packed tokens, N answer tokens; `in` and `out`
are a linear layer's widths.
"""

from kernels.training.adamw import RunStep, adamw
from kernels.training.attention import attention
from kernels.training.cross_entropy import answer_loss
from kernels.training.lora import lora_linear
from kernels.training.mixers import DeltaHeads, GatedHeads, ShapedHeads, SharedKeys
from kernels.training.norms import Norm, rms_norm
from kernels.training.pools import SPAN, LoraSite, Placement, Pools, make_sites
from kernels.training.rope import rope
from kernels.training.segments import Rows, Segments, make_rows, make_segments
from kernels.training.silu import SiluMul, silu_mul
from kernels.training.sublayers import Heads, LoraWeight, Mixer, attention_sublayer, mlp_sublayer

__all__ = [
    "SPAN",
    "DeltaHeads",
    "GatedHeads",
    "Heads",
    "LoraSite",
    "LoraWeight",
    "Mixer",
    "Norm",
    "Placement",
    "Pools",
    "Rows",
    "RunStep",
    "Segments",
    "ShapedHeads",
    "SharedKeys",
    "SiluMul",
    "adamw",
    "answer_loss",
    "attention",
    "attention_sublayer",
    "lora_linear",
    "make_rows",
    "make_segments",
    "make_sites",
    "mlp_sublayer",
    "rms_norm",
    "rope",
    "silu_mul",
]
