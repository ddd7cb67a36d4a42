"""The GPU's decoder against Hugging Face, adapters merged into its weights one by one.

Runs on a card under `make test-gpu`; elsewhere Triton's interpreter runs the same kernels, and the
fixed buffers without a graph.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.adapters.threads import start_thread
from engine.execution import gpu_decoder
from engine.execution.decode_graphs import DecodeGraphs, record, uncollected
from engine.execution.gpu_batch import GpuBatch
from engine.execution.gpu_decoder import GpuModel
from engine.execution.lora_inputs import LoraInputs
from engine.execution.lora_table import LoraScope
from engine.model.config import ModelConfig
from engine.model.weights import LayerWeights, Weights
from kernels import LoraTable, PageLayout
from kernels.attention_decode import DecodeWorkspace
from kernels.lora.plan import make_plan
from tests.kernels.cases import Adapters, make_adapters

E, H, K, D, INNER, V, LAYERS = 32, 4, 2, 16, 48, 64, 2
WIDTHS = {
    0: (E, 64),
    1: (E, 32),
    2: (E, 32),
    3: (64, E),
    4: (E, INNER),
    5: (E, INNER),
    6: (INNER, E),
}
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=K, head_dim=D,
        intermediate_size=INNER, vocab_size=V, num_hidden_layers=LAYERS,
        max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(DEVICE)
    for parameter in model.parameters():  # far from the small initial values: errors must show
        parameter.data = torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 1)
    return model


def as_weights(model: LlamaForCausalLM) -> Weights:
    layers = tuple(
        LayerWeights(
            attention_norm=layer.input_layernorm.weight.data,
            qkv=torch.cat([getattr(layer.self_attn, f"{n}_proj").weight.data for n in "qkv"]),
            o=layer.self_attn.o_proj.weight.data,
            mlp_norm=layer.post_attention_layernorm.weight.data,
            gate_up=torch.cat([layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data]),
            down=layer.mlp.down_proj.weight.data,
        )
        for layer in model.model.layers
    )
    return Weights(
        embedding=model.model.embed_tokens.weight.data,
        layers=layers,
        norm=model.model.norm.weight.data,
        lm_head=model.lm_head.weight.data,
    )


def merged(base: LlamaForCausalLM, adapters: Adapters, adapter: int) -> LlamaForCausalLM:
    """The base with W + s B A in place of W; the base itself for -1."""
    if adapter < 0:
        return base
    model = copy.deepcopy(base)
    for (layer, projection), a in adapters.a[adapter].items():
        block = model.model.layers[layer]
        owner = block.self_attn if projection < 4 else block.mlp
        b = adapters.b[adapter][layer, projection]
        getattr(owner, NAMES[projection]).weight.data += adapters.scale[adapter] * (b.T @ a)
    return model


class Rig:
    """A GpuModel whose arena holds adapters and three sequences' pages.

    The reference computes in fp32 with the same values, rounded to `dtype`.
    """

    def __init__(self, ranks: list[int], dtype: torch.dtype = torch.float32) -> None:
        self.base = make_base().to(dtype).float()
        self.layout = PageLayout(num_layers=LAYERS, num_kv_heads=K, head_dim=D)
        self.adapters = make_adapters(WIDTHS, ranks, num_layers=LAYERS, device=DEVICE)
        num_pages = 16
        shift = num_pages * self.layout.page_elems
        rest = -self.adapters.arena.numel() % self.layout.page_elems
        nothing = torch.full((shift,), float("nan"), device=DEVICE)
        flat = torch.cat((nothing, self.adapters.arena, nothing[:rest]))
        table = self.adapters.table
        self.adapters.table = LoraTable(
            entry_start=table.entry_start,
            num_tiles=table.num_tiles,
            a_offset=torch.where(table.a_offset < 0, -1, table.a_offset + shift),
            b_offset=torch.where(table.b_offset < 0, -1, table.b_offset + shift),
            rows=table.rows,
            scale=table.scale,
        )
        for matrices in (self.adapters.a, self.adapters.b):
            for matrix in matrices:
                for key in matrix:
                    matrix[key] = matrix[key] * 0.3
        flat[shift:][: self.adapters.arena.numel()] *= 0.3
        self.model = GpuModel(
            config=ModelConfig.from_fields(json.loads(self.base.config.to_json_string()), None),
            weights=as_weights(copy.deepcopy(self.base).to(dtype)),
            layout=self.layout,
            arena=flat.to(dtype).view(-1, self.layout.page_elems),
            max_positions=128,
        )

    def expected(self, prompt: list[int], adapter: int) -> torch.Tensor:
        model = merged(self.base, self.adapters, adapter)
        with torch.no_grad():
            return model(torch.tensor([prompt], device=DEVICE)).logits[0]


PROMPTS = [[5, 9, 2, 40, 3, 3, 17], [8, 1, 30] * 10, [60]]


def prefill(rig: Rig, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all prompts in one pass; (logits of every token, page tables)."""
    tables = torch.arange(12, dtype=torch.int32).view(3, 4).flip(0).contiguous()
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    positions = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(3), lengths)
    slots = tables[sequence, positions // 16].long() * 16 + positions % 16
    lora = rig.adapters.batch([(len(p), v) for p, v in zip(PROMPTS, chosen, strict=True)])
    uses = any(v >= 0 for v in chosen)
    batch = GpuBatch(
        token_ids=torch.tensor(list(itertools.chain(*PROMPTS))).to(DEVICE),
        positions=positions.to(DEVICE),
        slots=slots.to(DEVICE),
        query_start=torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32).to(DEVICE),
        context_lens=lengths.to(torch.int32).to(DEVICE),
        page_tables=tables.to(DEVICE),
        max_new=int(lengths.max()),
        workspace=DecodeWorkspace(3, H, rig.layout, torch.device(DEVICE)),
        table=lora.table if uses else None,
        plan=make_plan(lora, len(positions), 16) if uses else None,
    )
    return rig.model.forward(batch), tables.to(DEVICE)


@pytest.mark.parametrize("chosen", [[-1, -1, -1], [0, -1, 1], [1, 1, 0]], ids=str)
def test_prefill_then_decode_is_hugging_faces(chosen: list[int]) -> None:
    rig = Rig([4, 19])
    logits, tables = prefill(rig, chosen)
    expected = [rig.expected(p, v) for p, v in zip(PROMPTS, chosen, strict=True)]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-3, atol=1e-3)

    sequences = [
        [*prompt, int(rows[-1].argmax())] for prompt, rows in zip(PROMPTS, expected, strict=True)
    ]
    inputs = LoraInputs(rig.model.device, max_rows=4, max_tokens=4, max_entries=4096, max_blocks=2)
    graphs = DecodeGraphs(rig.model, max_batch=4, max_pages=6, lora=inputs)
    lora = rig.adapters.batch([(1, v) for v in chosen])
    positions = torch.tensor([len(prompt) for prompt in PROMPTS], device=DEVICE)
    for scope in LoraScope:
        graphs.capture(4, scope)
    graphs.load(
        token_ids=torch.tensor([tokens[-1] for tokens in sequences], device=DEVICE),
        context_lens=(positions + 1).to(torch.int32),
        page_tables=tables,
        lora=lora if lora.max_tiles else None,
        scope=LoraScope.ALL if lora.max_tiles else LoraScope.NONE,
        states=None,
    )
    for _ in range(4):  # past a page boundary, nothing uploaded in between
        logits = graphs.step()
        for s, adapter in enumerate(chosen):
            row = rig.expected(sequences[s], adapter)[-1]
            torch.testing.assert_close(logits[s], row, rtol=1e-3, atol=1e-3)
            sequences[s].append(int(row.argmax()))
        assert graphs.token_ids[:3].tolist() == [tokens[-1] for tokens in sequences]


@pytest.mark.parametrize("fused", [1 << 20, 16], ids=["", "fused"])
@pytest.mark.parametrize("chosen", [[-1, -1, -1], [0, -1, 1]], ids=str)
def test_a_long_pass_is_hugging_faces(
    chosen: list[int], fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_decoder, "_LONG", 16)
    monkeypatch.setattr(gpu_decoder, "_FUSED", fused)
    rig = Rig([4, 19])
    logits, _ = prefill(rig, chosen)
    expected = [rig.expected(p, v) for p, v in zip(PROMPTS, chosen, strict=True)]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bf16 matrix product")
@pytest.mark.parametrize("fused", [1 << 20, 16], ids=["", "fused"])
@pytest.mark.parametrize("chosen", [[-1, -1, -1], [0, -1, 1]], ids=str)
def test_bf16_is_as_near_as_hugging_faces_own(
    chosen: list[int], fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_decoder, "_FUSED", fused)
    rig = Rig([4, 19], torch.bfloat16)
    logits, _ = prefill(rig, chosen)
    wide = torch.cat([rig.expected(p, v) for p, v in zip(PROMPTS, chosen, strict=True)])
    narrow = []
    for tokens, adapter in zip(PROMPTS, chosen, strict=True):
        model = copy.deepcopy(merged(rig.base, rig.adapters, adapter)).to(torch.bfloat16)
        with torch.no_grad():
            narrow.append(model(torch.tensor([tokens], device=DEVICE)).logits[0].float())

    def error(out: torch.Tensor) -> float:
        return float((out - wide).norm() / wide.norm())

    assert error(logits.float()) <= 1.5 * error(torch.cat(narrow))


@pytest.mark.skipif(DEVICE != "cuda", reason="only a card records graphs")
def test_graphs_are_recorded_beside_threads_that_use_the_device() -> None:
    """As loader threads do, which allocate on the device and pin memory."""
    done = threading.Event()

    def load() -> None:
        sizes = itertools.cycle(range(1 << 20, 1 << 24, 1 << 18))
        while not done.is_set():
            size = next(sizes)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            host.to(DEVICE, non_blocking=True).sum().item()

    thread = start_thread(load)
    x = torch.ones(64, 64, device=DEVICE)
    stream = torch.cuda.Stream()
    try:
        for size in range(1, 9):
            graph, out = record(lambda size=size: (x * size) @ x, None, stream)
            graph.replay()
            torch.cuda.synchronize()
            assert out.eq(64 * size).all()
    finally:
        done.set()
        thread.result(timeout=10)


def test_nothing_is_collected_inside() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(DEVICE != "cuda", reason="only a card records graphs")
def test_a_graph_is_recorded_while_another_is_garbage() -> None:
    """As when an engine was dropped in a circle of references, and another one is made."""
    make_stream: Any = torch.cuda.Stream
    stream = make_stream()
    x = torch.ones(64, 64, device=DEVICE)
    former, _ = record(lambda: x + 1, None, stream)
    alive, num_runs = [former], 0
    is_gone = weakref.ref(former)
    del former

    def run() -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 3:  # the one that is recorded
            circle: list[object] = [alive.pop()]
            circle.append(circle)
            del circle
            allocated: list[object] = []
            for _ in range(100_000):  # many times what the collector waits for
                allocated.append([])
        return x @ x

    graph, out = record(run, None, stream)
    graph.replay()
    torch.cuda.synchronize()
    assert out.eq(64).all()
    gc.collect()
    assert is_gone() is None


@pytest.mark.skipif(DEVICE != "cuda", reason="only a card records graphs")
def test_graphs_use_the_same_memory_in_turn() -> None:
    """The arena gets what the largest of them leaves: each its own would not fit beside it."""
    make_stream: Any = torch.cuda.Stream
    stream, graphs = make_stream(priority=-1), []
    x = torch.ones(64 << 20, dtype=torch.uint8, device=DEVICE)
    pool = reserved = None
    for _ in range(4):
        graph, out = record(lambda: (x + 1).sum(), pool, stream)
        graphs.append((graph, out))
        torch.cuda.empty_cache()
        if pool is None:
            pool, reserved = graph.pool(), torch.cuda.memory_reserved()
    assert reserved is not None
    assert torch.cuda.memory_reserved() - reserved < 64 << 20
