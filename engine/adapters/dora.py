"""DoRA's row factors: they depend on the base's weight, so they are computed at each load.

DoRA replaces W by f * (W + s B A), where f = m / ‖W + s B A‖ by rows; m is in the adapter's file.
Source: DoRA, arXiv:2402.09353, equation 5; peft/tuners/lora/dora.py.
"""

from __future__ import annotations

import torch

# Elements of W + s B A that are in memory at a time, in fp32.
_MAX_ELEMS = 1 << 23


@torch.inference_mode()
def row_gain(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, magnitude: torch.Tensor
) -> torch.Tensor:
    """Return f - 1 [out], fp32 in host memory; not finite where a row of W + s B A is zero.

    weight     [out, in] on the engine's device, which computes: a GPU on a stream of its own, so
               that only the calling loader thread waits
    a, b       [R, in] and [out, R]
    scaling    s
    magnitude  m [out]
    """
    out_width, in_width = weight.shape
    stream = torch.cuda.Stream(weight.device) if weight.is_cuda else None  # type: ignore[no-untyped-call]
    norms = []
    with torch.cuda.stream(stream):
        a, b = (matrix.to(weight.device).float() for matrix in (a, b))
        step = max(1, _MAX_ELEMS // in_width)
        for first in range(0, out_width, step):
            rows = slice(first, first + step)
            adapted = torch.addmm(weight[rows].float(), b[rows], a, alpha=scaling)
            norms.append(adapted.norm(dim=1))
        norm = torch.cat(norms).cpu()
    return magnitude.float() / norm - 1
