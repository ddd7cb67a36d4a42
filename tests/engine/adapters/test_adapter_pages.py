"""What adapters take of the arena: little more than their bytes, and back again."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adapters.pages import SUB_PAGES, AdapterPages, Place
from engine.adapters.plan import EMBEDDING, PROJECTION_NAMES, AdapterPlan, plan_adapter, sites_of
from engine.adapters.tiles import TileMap, place_tiles
from engine.memory.page_pool import PagePool, PageUse
from engine.model.config import ModelConfig
from engine.model.plan import Plan
from engine.model.rope import Rotation
from kernels import PageLayout

_COMMON: dict[str, Any] = {
    "max_positions": 64,
    "plan": Plan(eps=1e-5, rotations=(Rotation(theta=1e4),)),
    "tie_embeddings": False,
    "eos_token_ids": (),
}
SMOLLM2 = ModelConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, **_COMMON,
)  # fmt: skip
LLAMA_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, **_COMMON,
)  # fmt: skip
MODELS = {"smollm2": SMOLLM2, "llama-3.1-8b": LLAMA_8B}
MOST_OVER = 1.05


def layout_of(model: ModelConfig) -> PageLayout:
    return PageLayout(
        num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim
    )


def adapter(
    model: ModelConfig, rank: int, names: tuple[str, ...], **config: bool
) -> tuple[AdapterPlan, int]:
    """The plan of an adapter of such modules, and how many values its tensors have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, site in sites_of(model).items():
        if module.split(".")[-1] not in names:
            continue
        in_width, out_width = site.widths(model)
        a, b = (
            ("lora_embedding_A", "lora_embedding_B")
            if site.projection == EMBEDDING
            else ("lora_A.weight", "lora_B.weight")
        )
        shapes[f"base_model.model.{module}.{a}"] = (rank, in_width)
        shapes[f"base_model.model.{module}.{b}"] = (out_width, rank)
        if config.get("use_dora"):
            shapes[f"base_model.model.{module}.lora_magnitude_vector"] = (out_width,)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, **config}
    num_values = sum(math.prod(shape) for shape in shapes.values())
    return plan_adapter(fields, shapes, model), num_values


def own_pages(tiles: TileMap) -> float:
    """Pages that are the adapter's: whole ones, and its sub-pages of shared ones."""
    return (
        tiles.num_pages
        if not tiles.tail_sub_pages
        else tiles.num_pages - 1 + tiles.tail_sub_pages / 8
    )


KINDS: dict[str, tuple[tuple[str, ...], dict[str, bool]]] = {
    "all": (PROJECTION_NAMES, {}),
    "dora": (PROJECTION_NAMES, {"use_dora": True}),
    "qv": (("q_proj", "v_proj"), {}),
    "ends": ((*PROJECTION_NAMES, "embed_tokens", "lm_head"), {"use_dora": True}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [4, 8, 16, 64, 256])
@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_takes_little_more_than_its_bytes(name: str, rank: int, kind: str) -> None:
    model = MODELS[name]
    names, config = KINDS[kind]
    plan, num_values = adapter(model, rank, names, **config)
    layout = layout_of(model)
    tiles = place_tiles(plan, model, layout)
    over = own_pages(tiles) * layout.page_elems / num_values
    assert 1 <= over <= MOST_OVER


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [(4,), (8,), (4, 8, 16)], ids=str)
def test_many_adapters_take_little_more_than_their_bytes(name: str, ranks: tuple[int, ...]) -> None:
    """What the pool has given away, shared pages that are partly empty included."""
    model = MODELS[name]
    layout = layout_of(model)
    pool = PagePool(1 << 14)
    pages = AdapterPages(pool)
    chance = random.Random(0)
    num_values, places = 0, []
    for i in range(200):
        plan, own = adapter(model, ranks[i % len(ranks)], PROJECTION_NAMES)
        tiles = place_tiles(plan, model, layout)
        needed = pages.num_needed(tiles.num_pages, tiles.tail_sub_pages)
        before = pool.num_used(PageUse.ADAPTER)
        places.append((own, pages.take(tiles.num_pages, tiles.tail_sub_pages)))
        assert pool.num_used(PageUse.ADAPTER) == before + needed
        num_values += own
    assert pool.num_used(PageUse.ADAPTER) * layout.page_elems <= MOST_OVER * num_values
    for own, place in chance.sample(places, 100):  # half of them go
        pages.release(place)
        num_values -= own
        places.remove((own, place))
    pages.check_integrity(place for _, place in places)
    assert pool.num_used(PageUse.ADAPTER) * layout.page_elems <= 1.1 * num_values


@pytest.mark.parametrize("rank", [3, 8])
def test_what_lies_in_sub_pages_is_found_there(rank: int) -> None:
    """Every offset moves with its sub-page, and nothing straddles two."""
    layout = layout_of(SMOLLM2)
    plan, _ = adapter(SMOLLM2, rank, PROJECTION_NAMES, use_dora=True)
    tiles = place_tiles(plan, SMOLLM2, layout)
    assert tiles.tail_sub_pages
    sub_page_elems = layout.page_elems // SUB_PAGES
    pages = list(range(100, 100 + 2 * (tiles.num_pages - 1), 2))
    tail = [9 * SUB_PAGES + 7 - i for i in range(tiles.tail_sub_pages)]
    moved = tiles.at(pages, layout.page_elems, tail)
    assert tiles.gain_offset is not None and moved.gain_offset is not None
    pairs = [(tiles.a_offset, moved.a_offset), (tiles.b_offset, moved.b_offset)]
    pairs.append((tiles.gain_offset, moved.gain_offset))
    num_in_tail = 0
    for befores, afters in pairs:
        for before, after in zip(befores.ravel().tolist(), afters.ravel().tolist(), strict=True):
            if before < 0:
                assert after == -1
                continue
            page, offset = divmod(before, layout.page_elems)
            if page < len(pages):
                assert after == pages[page] * layout.page_elems + offset
                continue
            sub_page, offset = divmod(offset, sub_page_elems)
            assert after == tail[sub_page] * sub_page_elems + offset
            num_in_tail += 1
    assert num_in_tail
    widths = SMOLLM2.projection_widths
    for entry, rows in enumerate(tiles.rows):
        in_width, out_width = widths[entry % 8]
        for offsets, width in ((tiles.a_offset, in_width), (tiles.b_offset, out_width)):
            for offset, count in zip(offsets[entry].tolist(), rows.tolist(), strict=True):
                if offset // layout.page_elems == tiles.num_pages - 1:
                    assert (
                        offset // sub_page_elems == (offset + count * width - 1) // sub_page_elems
                    )


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(1, 5), st.integers(0, SUB_PAGES - 1), st.integers(0, 99)
        ),
        max_size=60,
    )
)
@settings(deadline=2000, max_examples=200)
def test_pages_come_and_go(steps: list[tuple[bool, int, int, int]]) -> None:
    """Whatever the order: what is said to be needed and freed is, and nothing leaks."""
    pool = PagePool(60)
    pages = AdapterPages(pool)
    places: list[Place] = []
    for goes, num_pages, tail_sub_pages, index in steps:
        if goes and places:
            first = index % len(places)
            going = [places.pop(first) for _ in range(min(1 + index % 3, len(places) - first))]
            for place in going:
                pages.set_idle(place, is_idle=True)
            pages.check_integrity([*places, *going], going)
            wanted = pool.num_free + pages.num_idle
            for place in going:
                pages.set_idle(place, is_idle=False)
                pages.release(place)
            assert pool.num_free == wanted
        elif pool.can_take(needed := pages.num_needed(num_pages, tail_sub_pages), PageUse.ADAPTER):
            wanted = pool.num_free - needed
            places.append(pages.take(num_pages, tail_sub_pages))
            assert pool.num_free == wanted
            assert len(places[-1].tail) == tail_sub_pages
            assert len({sub_page // SUB_PAGES for sub_page in places[-1].tail}) <= 2
        pages.check_integrity(places)
        pool.check_integrity(pages.owned(places))
    for place in places:
        pages.release(place)
    assert pool.num_free == 60


@pytest.mark.parametrize("seed", range(20))
def test_what_others_leave_costs_a_blend_a_page_less_two_of_its_parts(seed: int) -> None:
    """`AdapterStore.most_pages`: tails lie where others made it worth while, who have gone."""
    choose = random.Random(seed)
    worst = 0
    for _ in range(300):
        pool = PagePool(100)
        pages = AdapterPages(pool)
        own: list[Place] = []
        others: list[Place] = []
        num_parts = choose.randint(2, 5)
        for _ in range(num_parts - 1):
            others += [pages.take(1, choose.randint(1, SUB_PAGES - 1)) for _ in range(4)]
            choose.shuffle(others)
            for _ in range(choose.randint(0, 4)):
                pages.release(others.pop())
            own.append(pages.take(1, choose.randint(1, SUB_PAGES - 1)))
        for place in others:
            pages.release(place)
        needed = pages.num_needed(1, choose.randint(1, SUB_PAGES - 1))
        total = pool.num_pages - pool.num_free + needed
        assert total <= num_parts + max(num_parts - 2, 0)
        worst = max(worst, total - num_parts)
    assert worst > 0
