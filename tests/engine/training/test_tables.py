"""The tables of a micro-batch's runs, against placing each module of each run by itself."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from engine.model.config import ModelConfig
from engine.training.parameters import AdapterLayout, Span, fused_of
from engine.training.tables import SiteTables
from kernels.lora.table import Projection
from kernels.training import SPAN, make_sites
from tests.engine.training.scenes import SETTINGS


def runs_of(config: ModelConfig) -> list[tuple[AdapterLayout, Span]]:
    runs, first = [], 3 * SPAN
    for settings in SETTINGS:
        layout = AdapterLayout(config, settings)
        runs.append((layout, Span(first, layout.size)))
        first += layout.size
    return runs


def test_tables_are_those_of_modules_placed_one_by_one(tiny: Path) -> None:
    config = ModelConfig.from_folder(tiny)
    tables = SiteTables(config, torch.device("cpu"))
    runs = runs_of(config)
    for chosen in (runs, runs[3:4], runs[::-1], runs[1::4]):
        bounds, placements = [], []
        for layer in range(config.num_layers):
            for projections in fused_of(config, layer):
                ends = [0]
                for projection in projections:
                    ends.append(ends[-1] + config.widths(layer)[projection][1])
                bounds.append(ends)
                placements.append([placed(chosen, layer, one) for one in projections])
        wanted = make_sites(bounds, placements, "cpu")
        found = [site for layer in tables.of(chosen) for site in layer]
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            for field in fields(ours):
                one, other = getattr(ours, field.name), getattr(theirs, field.name)
                if isinstance(one, torch.Tensor):
                    assert one.dtype == other.dtype and one.is_contiguous(), field.name
                    assert torch.equal(one, other), field.name
                else:
                    assert one == other, field.name


def placed(runs: list[tuple[AdapterLayout, Span]], layer: int, one: Projection) -> list[object]:
    return [layout.placement(span.first, layer, one) for layout, span in runs]


def test_tables_are_made_again_only_for_other_runs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_folder(tiny)
    tables = SiteTables(config, torch.device("cpu"))
    runs = runs_of(config)
    first = tables.of(runs)
    assert tables.of(list(runs)) is first
    # A run that ends and one that begins leave what is known of the others as it is.
    monkeypatch.setattr(AdapterLayout, "placement", None)
    assert tables.of(runs[1:]) is not first
    moved = [(layout, Span(span.first + SPAN, span.size)) for layout, span in runs]
    assert int(tables.of(moved)[0][0].a[0, 0]) == int(first[0][0].a[0, 0]) + SPAN
