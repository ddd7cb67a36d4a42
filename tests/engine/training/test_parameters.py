"""Where runs' parameters lie, what they begin as, and in which order rows come: PEFT's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict

from engine.model.config import ModelConfig
from engine.training.errors import RunRefused
from engine.training.initial import draw_initial
from engine.training.parameters import AdapterLayout, Span, SpanAllocator
from engine.training.run import LINEARS, RunSettings
from kernels.lora.table import Projection
from kernels.training import SPAN
from tests.engine.model.families import save_family
from tests.engine.training.scenes import peft_model


def test_spans_never_overlap_and_all_come_back() -> None:
    spans, chance = SpanAllocator(64 * SPAN + 7), random.Random(4)
    held: list[Span] = []
    for _ in range(2000):
        if held and chance.random() < 0.5:
            spans.give(held.pop(chance.randrange(len(held))))
        else:
            taken = spans.take(chance.randint(1, 12) * SPAN)
            held += [taken] if taken else []
        spans.check_integrity()
        assert spans.used == sum(span.size for span in held)
    for span in held:
        spans.give(span)
    spans.check_integrity()
    assert (spans.used, spans.take(64 * SPAN)) == (0, Span(0, 64 * SPAN))
    assert spans.take(SPAN) is None


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [
        RunSettings(rank=6, seed=3),
        RunSettings(rank=1, target_modules=("up_proj", "k_proj"), seed=8),
    ],
    ids=["all", "two"],
)
def test_a_run_begins_as_peft_makes_it_to_the_bit(
    family: str, settings: RunSettings, tmp_path: Path
) -> None:
    folder = save_family(tmp_path / family, family)
    config = ModelConfig.from_folder(folder)
    layout = AdapterLayout(config, settings)
    span = draw_initial(layout, config, settings.seed)
    wanted = get_peft_model_state_dict(peft_model(folder, settings))
    ours = layout.tensors(span)
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert layout.num_values == sum(tensor.numel() for tensor in wanted.values())


def test_factors_lie_apart_and_aligned(tiny: Path) -> None:
    layout = AdapterLayout(ModelConfig.from_folder(tiny), RunSettings(rank=3))
    end = 0
    for pair in layout.factors.values():
        for factor in pair:
            assert factor.offset % 8 == 0 and end <= factor.offset < end + 8
            end = factor.offset + factor.size
    assert end <= layout.size < end + SPAN and layout.size % SPAN == 0


def test_a_starting_adapter_has_to_fit(tiny: Path) -> None:
    layout = AdapterLayout(ModelConfig.from_folder(tiny), RunSettings(rank=3))
    given = {n: t.clone() for n, t in layout.tensors(torch.zeros(layout.size)).items()}
    layout.check(given)
    first = next(iter(given))
    wrong = {
        "missing from": {name: t for name, t in given.items() if name != first},
        "not trained by the run": {**given, "other": torch.zeros(1)},
        "has shape": {**given, first: torch.zeros(2, 64)},
        "not finite": {**given, first: torch.full((3, 64), float("nan"))},
    }
    for message, tensors in wrong.items():
        with pytest.raises(RunRefused, match=message) as caught:
            layout.check(tensors)
        assert caught.value.param == "adapter"


def test_the_linears_have_the_kernels_places(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(save_family(tmp_path, "llama"))
    places = {name.rpartition(".")[2]: Projection(p) for name, p in config.linears(0).items()}
    assert places == {name: Projection[name.split("_")[0].upper()] for name in LINEARS}


def test_a_target_that_no_layer_has_is_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(save_family(tmp_path, "llama"))
    layout = AdapterLayout(config, RunSettings(target_modules=("q_proj", "in_proj_z")))
    with pytest.raises(RunRefused, match="in_proj_z"):
        layout.check_targets(config)
