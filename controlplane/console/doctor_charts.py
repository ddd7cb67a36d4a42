"""Compute the shapes of the doctor's charts, which its page draws as SVG. Pure functions."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from controlplane.console.charts import BarChart, bar_chart

#: In the order in which the model applies them; others follow these.
_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CELL, _GAP = 20.0, 2.0
#: Singular values this much smaller than the largest lie on the axis.
_FLOOR = 1e-4

Module = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One matrix in the heat map; `strength` from 0 to 1 is its colour's, None: it is zero."""

    x: float
    y: float
    label: str
    strength: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Layers from left to right, kinds of matrices from top to bottom."""

    width: float
    height: float
    cell: float
    rows: tuple[str, ...]
    cells: tuple[Cell, ...]
    first_layer: int
    last_layer: int
    low: str
    high: str
    unit: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """The singular values of one kind of matrix over the layers, relative to the largest.

    line  of the median, band  from the smallest to the largest; points of SVG, y is logarithmic
    mark  the x of the mean effective rank
    """

    name: str
    width: int
    height: int
    line: str
    band: str
    mark: float
    rank: int
    effective_rank: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Log-probabilities by PEFT (x) and by the worker (y): (x, y, label) of each."""

    size: int
    points: tuple[tuple[float, float, str], ...]
    low: float


def heat_map(modules: Sequence[Module]) -> HeatMap | None:
    """Show how strongly each matrix of the layers changes; None without any."""
    inside = [module for module in modules if module.get("layer") is not None]
    if not inside:
        return None
    is_relative = all(module.get("relative") is not None for module in inside)
    field = "relative" if is_relative else "frobenius"
    names = _names(inside)
    first = min(module["layer"] for module in inside)
    last = max(module["layer"] for module in inside)
    top = max(module[field] for module in inside)
    cells = []
    for module in inside:
        value, row = module[field], names.index(module["name"])
        shown = _shown(value, is_relative)
        cells.append(
            Cell(
                x=(module["layer"] - first) * _CELL,
                y=row * _CELL,
                label=f"layer {module['layer']}, {_short(module['name'])}: {shown}",
                strength=round(0.12 + 0.88 * value / top, 3) if value > 0 else None,
            )
        )
    return HeatMap(
        width=(last - first + 1) * _CELL - _GAP,
        height=len(names) * _CELL - _GAP,
        cell=_CELL - _GAP,
        rows=tuple(_short(name) for name in names),
        cells=tuple(cells),
        first_layer=first,
        last_layer=last,
        low=_shown(min(module[field] for module in inside), is_relative),
        high=_shown(top, is_relative),
        unit="of the base's norm" if is_relative else "(Frobenius norm)",
    )


def effective_ranks(modules: Sequence[Module]) -> BarChart | None:
    """Show each layer's mean effective rank, on the scale of the rank; None without layers."""
    by_layer: dict[int, list[float]] = {}
    for module in modules:
        if module.get("layer") is not None:
            by_layer.setdefault(module["layer"], []).append(module["effective_rank"])
    if not by_layer:
        return None
    rank = max(module["rank"] for module in modules)
    means = [(layer, statistics.fmean(values)) for layer, values in sorted(by_layer.items())]
    values = [(f"layer {layer}: {mean:.1f} of {rank}", mean) for layer, mean in means]
    return bar_chart(values, top=float(rank))


def spectra(modules: Sequence[Module], *, width: int = 160, height: int = 90) -> list[Spectrum]:
    """Show the spectrum of each kind of matrix."""
    found = []
    for name in _names(modules):
        own = [m for m in modules if m["name"] == name and m["frobenius"] > 0]
        if not own:
            continue
        length = max(len(module["singular_values"]) for module in own)
        columns: list[list[float]] = [[] for _ in range(length)]
        for module in own:
            for column, value in zip(columns, module["singular_values"], strict=False):
                column.append(value / module["singular_values"][0])
        step = width / max(1, length - 1)

        def points(values: Sequence[float], step: float = step) -> list[str]:
            return [f"{i * step:.1f},{_height(v, height):.1f}" for i, v in enumerate(values)]

        highest = points([max(column) for column in columns])
        lowest = points([min(column) for column in columns])
        mean = statistics.fmean(module["effective_rank"] for module in own)
        found.append(
            Spectrum(
                name=_short(name),
                width=width,
                height=height,
                line=" ".join(points([statistics.median(column) for column in columns])),
                band=" ".join(highest + lowest[::-1]),
                mark=round(min(float(width), max(0.0, (mean - 1) * step)), 1),
                rank=max(module["rank"] for module in own),
                effective_rank=round(mean, 1),
            )
        )
    return found


def scatter(compared: Sequence[Module], *, size: int = 200) -> Scatter | None:
    """Show what PEFT and the worker computed; None if nothing was compared."""
    pairs = [
        (float(want), float(have), f"prompt {number}, position {position}")
        for number, prompt in enumerate(compared, start=1)
        for position, (want, have) in enumerate(
            zip(prompt["peft"], prompt["worker"], strict=True), start=1
        )
    ]
    if not pairs:
        return None
    low = min(-1.0, *(min(want, have) for want, have, _ in pairs))
    points = tuple(
        (
            round((1 - want / low) * size, 1),
            round(abs(have / low) * size, 1),
            f"{where}: {want:.3f} by PEFT, {have:.3f} on the worker",
        )
        for want, have, where in pairs
    )
    return Scatter(size=size, points=points, low=round(low, 1))


def _names(modules: Sequence[Module]) -> list[str]:
    names = dict.fromkeys(module["name"] for module in modules)
    known = {name: place for place, name in enumerate(_ORDER)}
    return sorted(names, key=lambda name: known.get(_short(name), len(_ORDER)))


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _shown(value: float, is_relative: bool) -> str:
    return f"{value:.2%}" if is_relative else f"{value:.3g}"


def _height(share: float, height: int) -> float:
    """Return the y of a share from _FLOOR to 1, on a logarithmic scale."""
    return abs(height * math.log(min(1.0, max(share, _FLOOR))) / math.log(_FLOOR))
