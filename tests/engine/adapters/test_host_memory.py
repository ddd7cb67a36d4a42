"""Host pages and what is done to values in them; the order in which pages are copied."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from engine import Engine
from engine.adapters.copies import _grouped, _runs
from engine.adapters.fast_tiles import write_plain
from engine.adapters.files import AdapterReader, _read_all
from engine.adapters.host_memory import HostMemory
from engine.adapters.host_values import are_finite, clear, write_rows
from engine.adapters.plan import AdapterPlan
from engine.config import EngineConfig
from engine.errors import AdapterMismatch
from engine.model.config import ModelConfig

NO_BASE: Any = None  # a plan and its place do not depend on the base's weights
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_room_comes_from_the_slab_or_is_the_adapters_own() -> None:
    host = HostMemory(torch.zeros(9, 8), 5 * 8 * 4)
    first, second = host.take(3), host.take(2)
    assert first.open() is second.open()
    assert sorted(first.numbers + second.numbers) == [0, 1, 2, 3, 4]
    assert not host.can_take(1)
    assert host.can_take(6)  # more than there ever is
    own = host.take(6)
    assert own.is_own and own.open().shape == (6, 8) and own.open() is own.open()
    host.check_integrity([first, second, own])
    host.release(own)
    host.release(first)
    assert host.can_take(3)
    host.check_integrity([second])
    with pytest.raises(AssertionError):
        host.check_integrity([first, second])


def test_without_a_budget_every_room_is_its_own() -> None:
    host = HostMemory(torch.zeros(9, 8), 0)
    assert host.can_take(1) and host.take(1).is_own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 17, (1 << 18) - 1, 1 << 18, (1 << 18) + 4])
def test_a_value_that_is_not_finite_is_found_anywhere(
    dtype: torch.dtype, bad: float, place: int
) -> None:
    values = torch.full(((1 << 18) + 5,), torch.finfo(dtype).max, dtype=dtype)
    values[::2] *= -1
    values[::3] = 0
    assert are_finite(values)
    values[place] = bad
    assert not are_finite(values)
    clear(values)
    assert are_finite(values) and not values.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_written_where_they_belong(dtype: torch.dtype) -> None:
    """Neighbours, gaps, a transposed source, another dtype; nothing beside is touched."""
    matrix = torch.randn(5, 7).to(dtype)
    offsets, counts = [3, 3 + 2 * 7, 60, -1], [2, 1, 2, 0]
    for source in (matrix, matrix.T.contiguous().T):
        for flat_dtype in (dtype, torch.float32):
            flat = torch.full((90,), 7.0, dtype=flat_dtype)
            write_rows(flat, offsets, counts, source)
            wanted = torch.full((90,), 7.0, dtype=flat_dtype)
            wanted[3 : 3 + 21] = matrix[:3].reshape(-1).to(flat_dtype)
            wanted[60:74] = matrix[3:].reshape(-1).to(flat_dtype)
            assert torch.equal(flat, wanted)


def test_a_file_that_ends_early_is_told() -> None:
    buffer = bytearray(10)
    pieces: SimpleQueue[memoryview | bytes] = SimpleQueue()
    _read_all(io.BytesIO(b"0123456789"), memoryview(buffer), pieces)
    assert bytes(buffer) == b"0123456789" == bytes(pieces.get())
    with pytest.raises(AdapterMismatch, match="truncated"):
        _read_all(io.BytesIO(b"012345678"), memoryview(buffer), pieces)


def test_the_quick_way_and_the_general_one_agree(
    tiny_model: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of adapter, bit by bit; the plain ones leave nothing for the general way."""
    engine = Engine(EngineConfig(model_dir=tiny_model, arena_bytes=4 << 20))
    reader = engine._store._reader
    arena = torch.zeros(1, engine._runner.arena.shape[1])
    left: list[int] = []

    def packed(way: Callable[..., AdapterPlan]) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("engine.adapters.files.write_plain", way)
        found = {}
        for name, path in adapters.items():
            room = HostMemory(arena, 0).take(reader.place(reader.read_plan(path)).num_pages)
            reader.load(name, path, room)
            found[name] = room.open()
        return found

    def counted(*given: Any) -> AdapterPlan:
        plan = write_plain(*given)
        left.append(len(plan.targets))
        return plan

    quick, general = packed(counted), packed(lambda room, plan, *rest: plan)
    assert all(torch.equal(quick[name], general[name]) for name in adapters)
    assert dict(zip(adapters, left, strict=True))["all-4"] == 0
    engine.close()


def test_layers_are_whole_when_their_pages_are(tiny_model: Path, adapters: dict[str, Path]) -> None:
    model = ModelConfig.from_folder(tiny_model)
    layout = EngineConfig(model_dir=tiny_model).page_layout(model)
    reader = AdapterReader(model, layout, NO_BASE)
    for path in adapters.values():
        tiles = reader.place(reader.read_plan(path))
        ends = tiles.layer_ends(layout.page_elems)
        assert ends == sorted(ends) and ends[-1] == tiles.num_pages
        for entry in range(tiles.a_offset.shape[0]):
            for offsets in (tiles.a_offset[entry], tiles.b_offset[entry]):
                for offset in offsets[offsets >= 0].tolist():
                    assert offset // layout.page_elems < ends[entry // 8]


@pytest.mark.parametrize("ends", [[1], [0, 0, 3], [1, 1, 2, 5], list(range(1, 33)), [4] * 40])
def test_layers_are_grouped_in_order(ends: list[int]) -> None:
    groups = _grouped(ends)
    assert groups == sorted(set(groups)) and groups[-1] == ends[-1] and len(groups) <= 8
    assert all(any(group >= end for group in groups) for end in ends)


def test_neighbouring_pages_go_in_one_copy() -> None:
    assert _runs([4, 5, 6, 7], [0, 1, 2, 3], 0, 4) == [(0, 4)]
    assert _runs([4, 5, 6, 7], [0, 1, 9, 10], 0, 4) == [(0, 2), (2, 4)]
    assert _runs([4, 5, 7, 8], [0, 1, 2, 3], 1, 4) == [(1, 2), (2, 4)]
    assert _runs([4, 5], [3, 2], 0, 2) == [(0, 1), (1, 2)]
    assert _runs([4, 5], [3, 2], 1, 1) == []
