"""The spectrum of each change B·A of an adapter, from its factors alone.

    Δ = s·B·A,  B [out, r], A [r, in],  B = Qb Rb,  Aᵀ = Qa Ra   ⇒   Δ = Qb (s·Rb Raᵀ) Qaᵀ

Qb and Qa have orthonormal columns, so the singular values of Δ are those of s·Rb Raᵀ, which is
r × r: the whole matrix, [out, in], is never made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from contract.adapters.base_shape import BaseShape
from contract.adapters.fit import FittedAdapter, fit_adapter
from contract.adapters.peft_config import ENGINE_LIMITS, LoraConfig, load_json, read_config
from contract.adapters.peft_config import FILE as CONFIG_FILE
from contract.adapters.safetensors_header import FILE as TENSORS_FILE

#: With larger ranks the QR runs in fp32: in fp64 an adapter of rank 256 would take a minute.
MAX_RANK_FP64 = 64
#: Singular values that are told of each matrix.
MAX_TOLD = 64


class Adapter:
    """An adapter's files, with what they change in a base of this shape."""

    def __init__(self, folder: Path, base_config: Mapping[str, Any]) -> None:
        raw = load_json((folder / CONFIG_FILE).read_bytes(), ENGINE_LIMITS.max_bytes)
        self.config: LoraConfig = read_config(raw, ENGINE_LIMITS)
        self._path = folder / TENSORS_FILE
        with self._open() as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        self.fitted: FittedAdapter = fit_adapter(
            self.config, shapes, BaseShape.from_config(base_config)
        )

    def _open(self) -> Any:
        return safe_open(self._path, framework="pt")

    def modules(self, base_norms: Mapping[str, float]) -> Iterator[dict[str, Any]]:
        """Yield what is told of each adapted matrix, in the base's order.

        base_norms  module -> Frobenius norm of the base's matrix
        """
        with self._open() as file:
            for module, matrix in self.fitted.matrices.items():
                a, b = file.get_tensor(matrix.a_name), file.get_tensor(matrix.b_name)
                values = singular_values(a, b, matrix.scaling, matrix.num_stacked)
                told = _told(module, values)
                told |= {"rank": matrix.rank, "scaling": matrix.scaling}
                told["dtype"] = str(a.dtype).removeprefix("torch.")
                base = base_norms.get(module)
                told["relative"] = _short(told["frobenius"] / base) if base else None
                yield told


def singular_values(
    a: torch.Tensor, b: torch.Tensor, scaling: float, num_stacked: int = 1
) -> torch.Tensor:
    """Return the singular values of scaling · b @ a, largest first: [min(r, in, out)] fp64.

    a [r, in], b [out, r]; of experts that are stacked, the root of the squares' sum over them
    """
    if num_stacked > 1:
        stacks = b.view(len(b), -1, num_stacked).unbind(-1)
        each = zip(a.chunk(num_stacked), stacks, strict=True)
        found = torch.stack([singular_values(own, out, scaling) for own, out in each])
        return found.square().sum(0).sqrt()
    dtype = torch.float64 if a.shape[0] <= MAX_RANK_FP64 else torch.float32
    (_, r_a), (_, r_b) = (torch.linalg.qr(matrix.to(dtype)) for matrix in (a.T, b))
    core = (r_b @ r_a.T).double() * abs(scaling)
    values: torch.Tensor = torch.linalg.svdvals(core)
    return values


def effective_rank(values: torch.Tensor) -> float:
    """Return the effective rank of a matrix of these singular values; 0.0 if all are zero.

    It is the exponential of the entropy of the singular values as shares of their sum: r for r
    equal ones, 1 for a single one. Source: O. Roy, M. Vetterli, "The effective rank: a measure of
    effective dimensionality", EUSIPCO 2007.
    """
    total = float(values.sum())
    if total <= 0.0:
        return 0.0
    shares = values / total
    shares = shares[shares > 0]
    return math.exp(float(-(shares * shares.log()).sum()))


def rank_for(values: torch.Tensor, share: float) -> int:
    """Return how many of the largest singular values have this share of the energy."""
    energy = values.square()
    total = float(energy.sum())
    if total <= 0.0:
        return 0
    reached = energy.cumsum(0) >= share * total * (1 - 1e-12)
    return int(reached.int().argmax()) + 1


def _told(module: str, values: torch.Tensor) -> dict[str, Any]:
    layer, _, name = module.removeprefix("model.layers.").partition(".")
    in_layer = module.startswith("model.layers.")
    return {
        "module": module,
        "layer": int(layer) if in_layer else None,
        "name": name if in_layer else module,
        "frobenius": _short(float(values.square().sum().sqrt())),
        "spectral": _short(float(values[0]) if len(values) else 0.0),
        "effective_rank": round(effective_rank(values), 2),
        "rank_90": rank_for(values, 0.90),
        "rank_99": rank_for(values, 0.99),
        "singular_values": [_short(value) for value in values[:MAX_TOLD].tolist()],
    }


def _short(value: float) -> float:
    """Return a number with four digits, as JSON has it."""
    return float(f"{value:.4g}")
