"""docs/sizing.md computes what the engine computes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")  # as the module below; GPU machines have none

from engine.adapters.plan import PROJECTION_NAMES
from engine.adapters.tiles import place_tiles
from engine.config import EngineConfig
from engine.execution import arena
from engine.model.config import ModelConfig
from tests.engine.adapters.test_adapter_pages import LLAMA_8B, SMOLLM2, adapter

DOC = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
#: The page's constant for CUDA, graphs and the widest step.
REST_GB = 3.0
MODELS = {"Llama-3.1-8B": (LLAMA_8B, False), "SmolLM2-135M": (SMOLLM2, True)}


def weight_bytes(model: ModelConfig, *, is_tied: bool) -> int:
    """The page's formula: 2 bytes for each parameter."""
    per_layer = sum(a * b for a, b in model.projection_widths) + 2 * model.hidden_size
    embeddings = model.vocab_size * model.hidden_size * (1 if is_tied else 2)
    return 2 * (model.num_layers * per_layer + embeddings + model.hidden_size)


def token_bytes(model: ModelConfig) -> int:
    return 2 * model.num_layers * 2 * model.num_kv_heads * model.head_dim


def adapter_bytes(model: ModelConfig, rank: int) -> int:
    return 2 * rank * model.num_layers * sum(a + b for a, b in model.projection_widths)


def arena_gb(card_gb: float, model: ModelConfig, *, running: int = 64) -> float:
    drawing = 40 * running * model.vocab_size
    weights = weight_bytes(model, is_tied=False)
    return 0.98 * card_gb - (weights + drawing) / 1e9 - REST_GB


@pytest.mark.parametrize("model", [LLAMA_8B, SMOLLM2])
def test_a_page_is_the_kv_of_16_tokens(model: ModelConfig) -> None:
    config = EngineConfig(model_dir=Path(), device="cuda")
    assert config.page_bytes(model) == 16 * token_bytes(model)


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
