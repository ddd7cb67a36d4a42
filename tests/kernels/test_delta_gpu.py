"""The gated delta net's kernels against the reference: decodes, prompts, pages, adapters' parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.delta import DeltaShape, DeltaState, DeltaWeights, delta_net
from kernels.delta_gpu.decode import delta_decode_triton
from kernels.delta_gpu.inputs import Projected, make_inputs
from kernels.delta_gpu.prefill import chunk_of, delta_prefill_triton
from kernels.gates import Packed, gate_heads_triton, split_gates, split_heads_triton

EPS, LAYER, NUM_LAYERS = 1e-3, 1, 2
# Rows of a head's matrix that cross pages, and ones that do not.
SHAPES = {
    "crossing": (DeltaShape(num_keys=2, num_values=4, key_dim=5, value_dim=20, kernel=3), 96),
    "aligned": (DeltaShape(num_keys=1, num_values=2, key_dim=16, value_dim=8, kernel=4), 136),
    # As Qwen3.5 has it, but for the number of heads.
    "wide": (DeltaShape(num_keys=2, num_values=4, key_dim=128, value_dim=128, kernel=4), 20480),
}
SMALL = ("crossing", "aligned")
# Largest difference, and largest mean difference.
TOLERANCES = {
    torch.float32: (1e-4, 1e-5),
    torch.float16: (0.03, 3e-3),
    torch.bfloat16: (0.25, 5e-3),
}


class Scene:
    """Sequences with states in shuffled pages; each writes to other pages than it reads."""

    def __init__(
        self, name: str, lengths: list[int], new: list[int], dtype: torch.dtype, device: str
    ) -> None:
        torch.manual_seed(len(lengths))
        self.shape, page = SHAPES[name]
        shape, num, self.lengths, self.new = self.shape, len(lengths), lengths, new
        heads = shape.num_values

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes).to(dtype).to(device)

        self.weights = DeltaWeights(
            random(shape.widths[0], shape.kernel) / 2,
            random(heads) - 2,
            random(heads),
            random(shape.value_dim),
        )
        tokens = sum(lengths), sum(shape.widths)
        self.given = Projected(random(*tokens), random(*tokens) / 4)
        num_pages = -(-NUM_LAYERS * shape.state_size // page)
        order = torch.randperm(2 * num * num_pages).to(device)
        self.read, self.write = order.view(2, num, num_pages)
        self.arena = torch.randn(2 * num * num_pages, page).to(device)
        self.read[new] = -1
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        self.query_start = bounds.to(torch.int32).to(device)

    def state(self, table: torch.Tensor, row: int) -> DeltaState:
        shape, pages = self.shape, table[row]
        numbers = self.arena[pages.clamp(min=0)].flatten() * (pages[0] >= 0)
        size = shape.state_size
        numbers = numbers[LAYER * size : (LAYER + 1) * size]
        window = shape.window[0] * shape.window[1]
        return DeltaState(
            numbers[:window].view(1, *shape.window), numbers[window:].view(1, *shape.matrix)
        )

    def wanted(self) -> tuple[torch.Tensor, list[DeltaState]]:
        """What is read of the whole step, and the states behind it."""
        whole, outs, states = self.given.base.float() + self.given.delta.float(), [], []
        for row, packed in enumerate(whole.split(self.lengths)):
            before = self.state(self.read, row)
            out, after = delta_net(packed[None], before, self.weights, self.shape, EPS)
            outs.append(out[0])
            states.append(after)
        return torch.cat(outs), states

    def run(self) -> torch.Tensor:
        num_tokens = sum(self.lengths)
        chunk = chunk_of(self.given.base.dtype) if max(self.lengths) > 1 else None
        inputs = make_inputs(self.query_start, self.read, self.write, num_tokens, chunk)
        first = LAYER * self.shape.state_size
        out = self.given.base.new_full((num_tokens, self.shape.value_size), float("nan"))
        rest = (self.arena, inputs, self.shape, first, EPS, out)
        delta_decode_triton(self.given, self.weights, *rest)
        if chunk is not None:
            delta_prefill_triton(self.given, self.weights, *rest)
        return out

    def check(self, in_place: bool = False) -> None:
        if in_place:
            self.write = self.read.where(self.read >= 0, self.write)
        wanted, states = self.wanted()
        untouched = self.arena.clone()
        got = self.run()
        tolerance, mean = TOLERANCES[got.dtype]
        near = {"rtol": tolerance, "atol": tolerance}
        assert (got.float() - wanted).abs().mean() < mean
        torch.testing.assert_close(got.float(), wanted.float(), **near)
        for row, state in enumerate(states):
            found = self.state(self.write, row)
            torch.testing.assert_close(found.window, state.window, **near)
            torch.testing.assert_close(found.matrix, state.matrix, **near)
            pages = self.write[row].flatten()
            size = self.shape.state_size
            for numbers in (self.arena, untouched):
                flat = numbers[pages].flatten()
                flat[LAYER * size : (LAYER + 1) * size] = 0
                numbers[pages] = flat.view(len(pages), -1)
        assert torch.equal(self.arena, untouched)  # neither another layer nor another sequence


@pytest.mark.parametrize("name", SMALL)
def test_decodes(name: str, dtype: torch.dtype, device: str) -> None:
    Scene(name, [1] * 5, [3], dtype, device).check()


@pytest.mark.parametrize("name", SMALL)
def test_decodes_among_prompts(name: str, dtype: torch.dtype, device: str) -> None:
    if device != "cpu" and dtype != torch.float32:
        pytest.skip("GpuRunner refuses it: narrow heads in 16 bits are wrong on a card")
    lengths = [2, 1, 130, 3, 1, 64, 1, 33]
    Scene(name, lengths, [1, 2], dtype, device).check()


def test_the_heads_of_a_model(dtype: torch.dtype, device: str) -> None:
    if device == "cpu":
        pytest.skip("slow in the interpreter")
    for lengths in ([1] * 9, [1, 200, 2, 64, 1, 129]):
        Scene("wide", lengths, [1], dtype, device).check(in_place=True)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 1, 70]])
def test_states_change_in_place(lengths: list[int], device: str) -> None:
    Scene("aligned", lengths, [], torch.float32, device).check(in_place=True)


def test_padding_is_neither_read_nor_written(device: str) -> None:
    scene = Scene("aligned", [1, 1, 1], [], torch.float32, device)
    scene.write[1], before = -1, scene.arena.clone()
    others = scene.write[[0, 2]].flatten()
    out = scene.run()
    assert bool(out[[0, 2]].isfinite().all())
    before[others] = scene.arena[others]
    assert torch.equal(scene.arena, before)


def test_equal_keys_without_decay_are_inverted_exactly(device: str) -> None:
    """Sums of powers of that matrix would cancel: their binomials reach 1e18."""
    scene = Scene("aligned", [64], [0], torch.float32, device)
    scene.given = Projected(scene.given.base[:1].expand(64, -1).contiguous(), None)
    scene.weights = scene.weights._replace(rate=torch.full_like(scene.weights.rate, -20.0))
    scene.given.base[:, -2 * scene.shape.num_values :] = 9.0
    scene.given = Projected(scene.given.base, torch.zeros_like(scene.given.base))
    scene.check()


@pytest.mark.parametrize("has_more", [True, False])
def test_gates_are_split_and_applied(has_more: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(1)
    heads, kv_heads, width = 5, 2, 24
    size = (2 * heads + 2 * kv_heads) * width
    parts = [torch.randn(*shape).to(dtype).to(device) for shape in ((7, size), (7, size), (size,))]
    packed = Packed(*parts[: 3 if has_more else 1])
    total = sum((part.float() for part in parts[1:] if has_more), start=parts[0].float())
    qkv, gate = split_gates(total, heads, width)
    near: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if dtype != torch.float32 else {}
    got = split_heads_triton(packed, heads, width)
    torch.testing.assert_close(got.float(), qkv, **near)
    attended = torch.randn(7, heads * width).to(dtype).to(device)
    wanted = attended.float() * gate.sigmoid()
    gate_heads_triton(attended, packed, heads, width)
    torch.testing.assert_close(attended.float(), wanted, **near)
