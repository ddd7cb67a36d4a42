"""What quantisation changes, as an engine reports it, against Hugging Face's logits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import engine.model.weights
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.config import ModelConfig
from engine.model.weights import LINEARS, load_weights
from engine.stats import Comparison, Precision
from kernels.fp8 import Fp8Matrix, quantize_matrix
from kernels.int4 import Int4Matrix
from tests.engine.model import int4_bases
from tests.engine.model.families import save_family
from tests.engine.model.fp8_bases import keep_kv_in_fp8, make_fp8, save_checkpoint

PROMPTS = (tuple(range(1, 60)), tuple(range(90, 20, -2)), (5, 7, 5, 9, 5))
KINDS = {"attention": "self_attn", "mlp": "mlp"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("family"), "llama-biases")


def report(folder: Path, **given: Any) -> Precision:
    config = EngineConfig(
        model_dir=folder, arena_bytes=1 << 22, max_running=2, precision_prompts=PROMPTS, **given
    )
    engine = Engine(config)
    try:
        return engine.stats().precision
    finally:
        engine.close()


def hf_logits(base: Path, *changes: Callable[[torch.nn.Module], object]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for change in changes:
        change(model)
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in PROMPTS])


def fp8_of(base: Path, part: str) -> dict[str, Fp8Matrix]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return {
        name: quantize_matrix(module.weight.data)
        for name, module in model.named_modules()
        if f".{part}." in name and name.endswith("_proj")
    }


def check(found: Comparison, wanted: torch.Tensor, got: torch.Tensor) -> None:
    p, q = wanted.log_softmax(-1), got.log_softmax(-1)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.1, abs=1e-7)
    same = (wanted.argmax(-1) == got.argmax(-1)).float().mean()
    assert found.agreement == pytest.approx(float(same), abs=0.03)
    assert found.logit_error == pytest.approx(float((wanted - got).abs().max()), rel=0.1)


def test_a_base_quantised_at_load(base: Path) -> None:
    found = report(base, base_precision="fp8", kv_precision="fp8")
    assert (found.weights, found.kv, found.compared_with) == ("fp8", "fp8", "float32")
    assert found.adapters == "float32"
    assert found.num_tokens == sum(map(len, PROMPTS))
    wanted = hf_logits(base)
    assert set(found.kinds) == {"all", "attention", "mlp", "kv"}
    check(found.kinds["all"], wanted, hf_logits(base, make_fp8, keep_kv_in_fp8))
    check(found.kinds["kv"], wanted, hf_logits(base, keep_kv_in_fp8))
    for kind, part in KINDS.items():
        make = functools.partial(make_fp8, matrices=fp8_of(base, part))
        check(found.kinds[kind], wanted, hf_logits(base, make))


def test_a_checkpoint_is_compared_with_what_it_holds(base: Path, tmp_path: Path) -> None:
    save_checkpoint(base, tmp_path / "fp8", "fp8-dynamic")
    found = report(tmp_path / "fp8")
    assert (found.weights, found.kv, found.compared_with) == ("fp8", "float32", "checkpoint")
    assert 0 < found.kinds["all"].kl < 0.02
    int4_bases.save_checkpoint(base, tmp_path / "int4", "packed")
    found = report(tmp_path / "int4")
    assert found.weights == "int4"
    # A CPU multiplies by the same numbers.
    assert found.kinds["all"] == Comparison(kl=0.0, agreement=1.0, logit_error=0.0)


@pytest.mark.parametrize(("kind", "broken"), [("attention", 1), ("mlp", 7)])
def test_a_broken_matrix_is_seen(
    base: Path, monkeypatch: pytest.MonkeyPatch, kind: str, broken: int
) -> None:
    """One matrix of one layer gets a wrong scale: o of layer 0, or down of layer 1."""
    count = 0

    def quantize(weight: torch.Tensor) -> Fp8Matrix:
        nonlocal count
        matrix = quantize_matrix(weight)
        if weight.is_meta:  # only shapes are checked
            return matrix
        scale = matrix.scale * (-3 if count == broken else 1)
        count += 1
        return Fp8Matrix(matrix.numbers, scale)

    right = report(base, base_precision="fp8")
    monkeypatch.setattr(engine.model.weights, "quantize_matrix", quantize)
    kinds = report(base, base_precision="fp8").kinds
    for name, now in kinds.items():
        before = right.kinds[name]
        if name in (kind, "all"):
            assert now.kl > 10 * before.kl
            assert now.logit_error > 3 * before.logit_error
        else:
            assert now == before


def test_nan_is_a_large_difference(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize(weight: torch.Tensor) -> Fp8Matrix:
        matrix = quantize_matrix(weight)
        return Fp8Matrix(matrix.numbers, matrix.scale * float("nan"))

    monkeypatch.setattr(engine.model.weights, "quantize_matrix", quantize)
    for found in report(base, base_precision="fp8").kinds.values():
        assert found.kl > 1000
        assert found.logit_error > 1000


def test_a_base_as_stored_is_not_compared(base: Path) -> None:
    kinds = {"weights": "float32", "kv": "float32", "adapters": "float32"}
    assert report(base) == Precision(**kinds)


def test_four_bits_of_the_bench(base: Path, tmp_path: Path) -> None:
    """`bench.quality` rounds each weight to the nearest of 16 steps, as the engine reads them."""
    from bench.quality import GROUP, save_int4

    # The tiny base's files hold fp32.
    save_int4(base, tmp_path / "int4")
    config = ModelConfig.from_folder(tmp_path / "int4")
    stored = load_weights(base, ModelConfig.from_folder(base), "cpu", torch.float32)
    read = load_weights(tmp_path / "int4", config, "cpu", torch.float32)
    for before, after in zip(stored.layers, read.layers, strict=True):
        for name in LINEARS:
            wanted, matrix = getattr(before, name), getattr(after, name)
            assert isinstance(matrix, Int4Matrix)
            assert matrix.group == GROUP
            step = matrix.scale.T.float().repeat_interleave(GROUP, dim=1)
            error = (wanted - matrix.dense()).abs()
            # The largest of a group may be cut off at 7 of 7.5 steps, and scales are rounded.
            assert (error <= step * 0.55).all()


def test_the_documented_costs_are_the_measured_ones() -> None:
    from bench.quality import PRECISIONS, RESULTS, table

    report = json.loads((RESULTS / "quality-cpu.json").read_text())
    assert [row["precision"] for row in report["precisions"]] == list(PRECISIONS)
    assert table(report) in (RESULTS.parent.parent / "docs" / "models.md").read_text()


def test_a_card_finds_what_a_cpu_does() -> None:
    from bench.quality import RESULTS

    ours, theirs = (
        json.loads((RESULTS / f"quality-{device}.json").read_text())["precisions"]
        for device in ("cpu", "h200")
    )
    assert [row["precision"] for row in ours] == [row["precision"] for row in theirs]
    for cpu, card in zip(ours, theirs, strict=True):
        assert card["base_perplexity"] == pytest.approx(cpu["base_perplexity"], rel=0.03)
        assert card["field_accuracy"] == pytest.approx(cpu["field_accuracy"], abs=0.04)
        for kind, found in cpu["compared"].items():
            assert card["compared"][kind]["kl"] == pytest.approx(found["kl"], abs=0.01)
