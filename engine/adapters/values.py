"""An adapter's tensors as they are applied, checked: no longer what PEFT wrote, equal in effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.adapters.base_weights import BaseWeights
from engine.adapters.dora import row_gain
from engine.adapters.host_values import are_finite
from engine.adapters.plan import AdapterPlan, Target
from engine.adapters.rows import Replacement
from engine.errors import AdapterMismatch

# Rows of a copy of the embedding that are compared at a time.
_ROWS = 8192


@dataclass(frozen=True, slots=True)
class AppliedValues:
    """What y = W x + b becomes: y + gain * y + shift + scaling * B A x.

    a      [R, in]
    b      [out, R]; DoRA's factor is in it
    gain   [out] fp32, DoRA's factor less one; None: plain LoRA
    shift  [out] fp32; None: none
    """

    a: torch.Tensor
    b: torch.Tensor
    gain: torch.Tensor | None
    shift: torch.Tensor | None


def applied_values(
    target: Target, tensor: Callable[[str], torch.Tensor], base: BaseWeights
) -> AppliedValues:
    """The target's values; raises AdapterMismatch naming a tensor that has others than numbers.

    tensor  gives a tensor of the file by name
    """
    found = {name: tensor(name) for name in target.names}
    for name, value in found.items():
        if not are_finite(value):
            raise AdapterMismatch(f"tensor {name} has values that are not finite", param=name)
    a, b = found[target.a_name], found[target.b_name]
    gain = shift = None
    if target.bias is not None:
        # The scale is applied to A's output, which a bias has no part in.
        shift = found[target.bias].float() * target.scaling
    if target.magnitude is not None:
        magnitude = found[target.magnitude]
        gain = row_gain(base.matrix(target.site), a, b, target.scaling, magnitude)
        if not torch.isfinite(gain).all():
            raise AdapterMismatch(
                f"tensor {target.magnitude} scales a row that the adapter makes zero",
                param=target.magnitude,
            )
        b = b.float() * (gain + 1)[:, None]
        base_bias = base.bias(target.site)
        if base_bias is not None:  # DoRA scales W x; the gain meets W x + b
            shift = -gain * base_bias
    return AppliedValues(a, b, gain, shift)


def replaced_rows(replacement: Replacement, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The new rows [tokens, hidden size], checked as in `applied_values`."""
    rows = tensor(replacement.name)
    if not are_finite(rows):
        name = replacement.name
        raise AdapterMismatch(f"tensor {name} has values that are not finite", param=name)
    if replacement.twin is not None and not torch.equal(rows, tensor(replacement.twin)):
        raise AdapterMismatch(
            f"tensor {replacement.twin} is not the embedding's, as ensure_weight_tying says",
            param="ensure_weight_tying",
        )
    return rows


def check_copies(
    plan: AdapterPlan, tensor: Callable[[str], torch.Tensor], base: BaseWeights
) -> None:
    """Raise AdapterMismatch unless what repeats other weights does so truly.

    Beside an adapted embedding or head PEFT saves the base's own matrix, and of tied ones both.
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
                f"tensor {plan.head.a_name} is not the embedding's, as ensure_weight_tying says",
                param="ensure_weight_tying",
            )


def _is_same(copy: torch.Tensor, weight: torch.Tensor) -> bool:
    """Equal but for rounding to the coarser of the two dtypes.

    Each of bfloat16 and float16 rounds what the other keeps: between them one rounding more counts.
    """
    dtypes = copy.dtype, weight.dtype
    if torch.float32 in dtypes or copy.dtype == weight.dtype:
        coarser = min(dtypes, key=lambda dtype: dtype.itemsize)
        return torch.equal(copy.to(coarser), weight.to(coarser))
    return torch.allclose(
        copy.float(), weight.float(), rtol=torch.finfo(torch.bfloat16).eps, atol=2**-24
    )
