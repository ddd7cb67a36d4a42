"""AppliedValues: an adapter's tensors in the form in which they are applied, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.adapters.base_weights import BaseWeights
from engine.adapters.host_values import are_finite
from engine.adapters.plan import AdapterPlan, Target
from engine.adapters.rows import Replacement
from engine.errors import AdapterMismatch

# Number of rows of a copy of the embedding to compare at a time.
_ROWS = 8192
# Elements of W + s B A that are in memory at a time, in fp32, for DoRA.
_MAX_DORA_ELEMS = 1 << 23


@dataclass(frozen=True, slots=True)
class AppliedValues:
    """The adapter changes y = W x + b to y + gain * y + shift + scaling * B A x.

    a      [R, in]
    b      [out, R]; already multiplied by DoRA's row factor
    gain   [out] fp32, DoRA's row factor minus one; None: no DoRA
    shift  [out] fp32; None: zero
    """

    a: torch.Tensor
    b: torch.Tensor
    gain: torch.Tensor | None
    shift: torch.Tensor | None


def applied_values(
    target: Target, tensor: Callable[[str], torch.Tensor], base: BaseWeights
) -> AppliedValues:
    """Compute the target's values; raise AdapterMismatch naming a tensor that is not finite.

    tensor  gives a tensor of the file by name
    """
    found = {name: tensor(name) for name in target.names}
    if target.num_stacked > 1:
        expert = target.site.expert or 0
        first = expert * target.rank
        found[target.a_name] = found[target.a_name][first : first + target.rank]
        found[target.b_name] = found[target.b_name][:, expert :: target.num_stacked]
    if target.rows is not None:
        found |= {name: found[name][target.rows] for name in target.names if name != target.a_name}
    for name, value in found.items():
        finite(name, value.contiguous())
    a, b = found[target.a_name], found[target.b_name]
    gain = shift = None
    if target.bias is not None:
        # The kernels scale A's output alone, so the bias of B is scaled here.
        shift = found[target.bias].float() * target.scaling
    if target.magnitude is not None:
        magnitude = found[target.magnitude]
        gain = _row_gain(base.matrix(target.site), a, b, target.scaling, magnitude)
        if not torch.isfinite(gain).all():
            raise AdapterMismatch(
                f"tensor {target.magnitude} divides by zero: the adapter makes a row of the weight "
                "zero",
                param=target.magnitude,
            )
        b = b.float() * (gain + 1)[:, None]
        base_bias = base.bias(target.site)
        if base_bias is not None:  # DoRA scales W x alone; the gain is applied to W x + b
            shift = -gain * base_bias
    return AppliedValues(a, b, gain, shift)


def finite(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values; raise AdapterMismatch naming it if one is not finite."""
    if not are_finite(values):
        raise AdapterMismatch(f"tensor {name} has values that are not finite", param=name)
    return values


def replaced_rows(replacement: Replacement, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return the new rows [tokens, hidden size]; raise AdapterMismatch naming what is wrong."""
    rows = finite(replacement.name, tensor(replacement.name))
    if replacement.twin is not None and not torch.equal(rows, tensor(replacement.twin)):
        raise AdapterMismatch(
            f"tensor {replacement.twin} differs from the embedding's, to which the head is tied: "
            "save both with the same rows",
            param="ensure_weight_tying",
        )
    return rows


def check_copies(
    plan: AdapterPlan, tensor: Callable[[str], torch.Tensor], base: BaseWeights
) -> None:
    """Raise AdapterMismatch unless tensors that repeat other weights equal them.

    Beside an adapted embedding or head, PEFT also saves the base's own matrix; if the two are tied,
    it saves both.
    """
    for name, site in plan.copies.items():
        weight = base.vocabulary(site)
        copy = tensor(name)
        for first in range(0, len(copy), _ROWS):
            rows = slice(first, first + _ROWS)
            if not _is_same(copy[rows].to(weight.device), weight[rows]):
                raise AdapterMismatch(
                    f"tensor {name} is not the base model's: save the adapter without it "
                    "(save_embedding_layers=False), or train the module whole (modules_to_save)",
                    param=name,
                )
    if plan.is_tied:
        assert plan.embedding is not None and plan.head is not None
        a, b = tensor(plan.embedding.a_name), tensor(plan.embedding.b_name)
        head_a, head_b = tensor(plan.head.a_name), tensor(plan.head.b_name)
        if not (torch.equal(head_a, b.T) and torch.equal(head_b, a.T)):
            raise AdapterMismatch(
                f"tensor {plan.head.a_name} differs from the embedding's, but ensure_weight_tying "
                "is set: save both with the same values",
                param="ensure_weight_tying",
            )


def _is_same(copy: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the two are equal after rounding to the coarser of their dtypes.

    bfloat16 and float16 each round what the other keeps, so between them one more rounding is
    allowed.
    """
    dtypes = copy.dtype, weight.dtype
    if torch.float32 in dtypes or copy.dtype == weight.dtype:
        coarser = min(dtypes, key=lambda dtype: dtype.itemsize)
        return torch.equal(copy.to(coarser), weight.to(coarser))
    return torch.allclose(
        copy.float(), weight.float(), rtol=torch.finfo(torch.bfloat16).eps, atol=2**-24
    )


@torch.inference_mode()
def _row_gain(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, magnitude: torch.Tensor
) -> torch.Tensor:
    """Return DoRA's f - 1 [out], fp32 in host memory; not finite where W + s B A has a zero row.

    DoRA replaces W by f * (W + s B A), where f = m / ‖W + s B A‖ by rows; m is in the adapter's
    file. So f depends on the base's weight, and is computed at each load.
    Source: DoRA, arXiv:2402.09353, equation 5; peft/tuners/lora/dora.py.

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
        step = max(1, _MAX_DORA_ELEMS // in_width)
        for first in range(0, out_width, step):
            rows = slice(first, first + step)
            adapted = torch.addmm(weight[rows].float(), b[rows], a, alpha=scaling)
            norms.append(adapted.norm(dim=1))
        norm = torch.cat(norms).cpu()
    return magnitude.float() / norm - 1
