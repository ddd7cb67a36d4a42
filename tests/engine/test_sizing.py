"""docs/sizing.md computes what the engine computes."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis")  # as the module below; GPU machines have none

from engine.adapters.plan import PROJECTION_NAMES
from engine.adapters.tiles import place_tiles
from engine.config import EngineConfig
from engine.execution import arena
from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from tests.engine.adapters.test_adapter_pages import LLAMA_8B, SMOLLM2, adapter
from tests.engine.model import int4_bases
from tests.engine.model.families import save_family
from tests.engine.model.test_families import WIDE

LLAMA_70B = dataclasses.replace(
    LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
DOC = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
#: The page's constant for CUDA, graphs and the widest step.
REST_GB = 3.0
MODELS = {"Llama-3.1-8B": (LLAMA_8B, False), "SmolLM2-135M": (SMOLLM2, True)}


def weight_bytes(model: ModelConfig, *, is_tied: bool, base: str = "bf16") -> int:
    """The page's formula: 2 bytes for each parameter, and for linears what the base has."""
    embeddings = model.vocab_size * model.hidden_size * (1 if is_tied else 2)
    norms = (2 * model.num_layers + 1) * model.hidden_size
    numbers = model.num_layers * sum(a * b for a, b in model.projection_widths)
    rows = model.num_layers * sum(out for _, out in model.projection_widths)
    linears = {
        "bf16": 2 * numbers, "FP8": numbers + 4 * rows, "4 bits": numbers // 2 + 3 * numbers // 128,
    }  # fmt: skip
    return linears[base] + 2 * (embeddings + norms)


def token_bytes(model: ModelConfig, kv: str = "bf16") -> int:
    per_number = 2 if kv == "bf16" else 1
    return per_number * model.num_layers * 2 * model.num_kv_heads * model.head_dim


def adapter_bytes(model: ModelConfig, rank: int) -> int:
    return 2 * rank * model.num_layers * sum(a + b for a, b in model.projection_widths)


def arena_gb(card_gb: float, model: ModelConfig, *, running: int = 64, base: str = "bf16") -> float:
    drawing = 40 * running * model.vocab_size
    weights = weight_bytes(model, is_tied=False, base=base)
    return 0.98 * card_gb - (weights + drawing) / 1e9 - REST_GB


def _bytes(value: object) -> int:
    """All bytes of a tensor, or of the tensors in a matrix's or a layer's fields."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return sum(_bytes(getattr(value, field.name)) for field in fields)


@pytest.mark.parametrize("base", ["bf16", "FP8", "4 bits"])
def test_weights_take_what_the_page_says(tmp_path: Path, base: str) -> None:
    folder = save_family(tmp_path / "base", "llama", **WIDE)
    if base == "4 bits":
        int4_bases.save_checkpoint(folder, tmp_path / "stored", "gptq-128")
        folder = tmp_path / "stored"
    model = ModelConfig.from_folder(folder)
    weights = load_weights(folder, model, "cpu", torch.bfloat16, in_fp8=base == "FP8")
    taken = _bytes(weights) + sum(map(_bytes, weights.layers))
    assert taken == weight_bytes(model, is_tied=False, base=base)


@pytest.mark.parametrize(("kv", "kv_precision"), [("bf16", None), ("FP8", "fp8")])
@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B, SMOLLM2])
def test_a_page_is_the_kv_of_16_tokens(
    model: ModelConfig, kv: str, kv_precision: str | None
) -> None:
    config = EngineConfig(model_dir=Path(), device="cuda", kv_precision=kv_precision)
    assert config.page_bytes(model) == 16 * token_bytes(model, kv)


@pytest.mark.parametrize("rank", [4, 8, 16, 64, 256])
def test_an_adapter_takes_its_values_and_little_more(rank: int) -> None:
    config = EngineConfig(model_dir=Path(), device="cuda")
    plan, values = adapter(LLAMA_8B, rank, PROJECTION_NAMES)
    assert 2 * values == adapter_bytes(LLAMA_8B, rank)
    tiles = place_tiles(plan, LLAMA_8B, config.page_layout(LLAMA_8B))
    eighths = 8 * tiles.num_pages
    if tiles.tail_sub_pages:
        eighths += tiles.tail_sub_pages - 8
    taken = eighths * config.page_bytes(LLAMA_8B) / 8
    assert 1.0 <= taken / adapter_bytes(LLAMA_8B, rank) <= 1.05


def test_the_margins_are_the_engines() -> None:
    assert arena._MARGIN_SHARE == pytest.approx(1 - 0.98)
    assert arena._SAMPLING_BYTES == 40
    assert EngineConfig(model_dir=Path()).max_running == 64
    assert EngineConfig(model_dir=Path()).host_cache_bytes == 256 << 20


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    part = DOC.split(heading, 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_models_of_the_page() -> None:
    found = {row[0]: row[1:] for row in rows("## Constants of a model")}
    assert set(found) == set(MODELS)
    for name, (model, is_tied) in MODELS.items():
        weights, token, rank_1, rank_16 = found[name]
        assert weights == f"{weight_bytes(model, is_tied=is_tied) / 1e9:.2f} GB"
        assert token == f"{token_bytes(model) / 1e3:.1f} KB"
        assert rank_1 == f"{adapter_bytes(model, 1) / 1e6:.2f} MB"
        assert rank_16 == f"{adapter_bytes(model, 16) / 1e6:.1f} MB"


def card_row(model: ModelConfig, base: str) -> list[str]:
    """A row of the page's table: the arena, and tokens of KV in bfloat16 and in FP8."""
    cells = [f"{weight_bytes(model, is_tied=False, base=base) / 1e9:.1f} GB"]
    for card_gb in (24, 48, 80, 141):
        left = arena_gb(card_gb, model, base=base)
        tokens = [
            math.floor(left * 1e9 / token_bytes(model, kv) / 1000) * 1000 for kv in ("bf16", "FP8")
        ]
        is_enough = tokens[1] >= 4096
        cells.append(f"{left:.1f} GB: {tokens[0]:,}; {tokens[1]:,}" if is_enough else "–")
    return cells


def test_what_a_card_holds() -> None:
    models = {"Llama-3.1-8B": LLAMA_8B, "Llama-3.1-70B": LLAMA_70B}
    expected = [
        [name, base, *card_row(model, base)]
        for name, model in models.items()
        for base in ("bf16", "FP8", "4 bits")
    ]
    assert rows("## What a card holds") == expected


def test_the_worked_examples() -> None:
    examples = rows("## Examples: Llama-3.1-8B")
    assert len(examples) == 4
    for card, pages, adapters, rank, kv, tokens, requests in examples:
        card_gb = float(re.findall(r"\d+", card)[0])
        of_adapters = int(adapters) * adapter_bytes(LLAMA_8B, int(rank)) / 1e9
        left = arena_gb(card_gb, LLAMA_8B) - of_adapters
        assert pages == f"{arena_gb(card_gb, LLAMA_8B):.1f} GB"
        assert kv == f"{left:.1f} GB"
        num_tokens = math.floor(left * 1e9 / token_bytes(LLAMA_8B) / 1000) * 1000
        assert tokens == f"{num_tokens:,}"
        assert requests == str(num_tokens // 4096)
