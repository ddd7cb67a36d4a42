"""What the host works out for a micro-batch: blocks, chunks, and where adapters lie."""

from __future__ import annotations

import pytest
import torch

from kernels.training import Placement, make_rows, make_segments, make_sites, segments


@pytest.mark.parametrize("size", [1, 16, 64])
def test_blocks_cover_every_token_once_and_no_two_runs(size: int) -> None:
    lengths = [5, 0, 64, 1, 130]
    parts = make_segments(lengths, "cpu")
    seen = []
    for run, first, count, _ in parts.blocks(size).tolist():
        start, end = parts.bounds[run : run + 2]
        assert start <= first and first + count <= end and 0 < count <= size
        assert (first - start) % size == 0, "counted from the run's own first token"
        seen += range(first, first + count)
    assert seen == list(range(sum(lengths)))


def test_chunks_have_slots_where_a_run_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CHUNK", 10)
    chunks = make_segments([10, 25, 0, 3, 11], "cpu").chunks()
    assert [row[3] for row in chunks.table.tolist()] == [-1, 0, 1, 2, -1, 3, 4]
    assert chunks.merges.tolist() == [[1, 0, 3, 0], [4, 3, 2, 0]]
    assert chunks.slots == 5


def test_rows_know_their_positions_and_blocks() -> None:
    rows = make_rows([3, 0, 2], "cpu")
    assert rows.positions.tolist() == [0, 1, 2, 0, 1]
    assert (rows.bounds, rows.longest) == ((0, 3, 3, 5), 3)
    assert rows.blocks(2).tolist() == [[0, 0, 3, 0], [2, 0, 3, 0], [3, 3, 5, 0]]


def test_nothing_at_all() -> None:
    assert make_rows([], "cpu").positions.tolist() == []
    assert make_segments([], "cpu").blocks(16).shape == (0, 4)
    assert make_segments([0], "cpu").chunks().table.shape == (0, 4)


def test_sites_of_many_weights_share_an_upload() -> None:
    one, two = Placement(0, 64, 8, 0.5), Placement(1024, 2048, 24, 2.0)
    odd = Placement(9, 100, 3, 1.0)
    sites = make_sites([(0, 4, 6), (0, 5)], [[[one, None], [None, two]], [[odd, None]]], "cpu")
    assert sites[0].a.tolist() == [[0, 0], [0, 1024]]
    assert sites[0].b.tolist() == [[64, 0], [0, 2048]]
    assert sites[0].rank.tolist() == [[8, 0], [0, 24]]
    assert sites[0].scale.tolist() == [[0.5, 0.0], [0.0, 2.0]]
    assert (sites[0].max_rank, sites[0].padded_rank, sites[0].rank_step) == (24, 32, 8)
    assert (sites[0].aligned, sites[1].aligned) == (True, False)
    assert (sites[1].max_rank, sites[1].rank_step) == (3, 1)
    assert sites[0].a.untyped_storage().data_ptr() == sites[1].b.untyped_storage().data_ptr()
    [nobody] = make_sites([(0, 5)], [[[None]]], "cpu")
    assert (nobody.max_rank, nobody.padded_rank) == (0, 0)
    assert isinstance(nobody.rank, torch.Tensor)
