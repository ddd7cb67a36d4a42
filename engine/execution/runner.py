"""ModelRunner: the weights, the arena tensor and the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.adapters.base_weights import BaseWeights, PlainWeights
from engine.config import EngineConfig
from engine.errors import OutOfMemory
from engine.execution.arena import arena_pages
from engine.execution.batch import Batch
from engine.execution.decoder import (
    Adapters,
    Attention,
    Decoder,
    ExtendedAdapters,
    PagedAttention,
    TiledAdapters,
)
from engine.execution.draft_heads import DraftHeads
from engine.execution.gpu_runner import GpuRunner, Tokens
from engine.execution.in_flight import InFlightStep
from engine.execution.lora_inputs import MAX_ENTRIES
from engine.execution.lora_table import EntryBuffers
from engine.execution.mask_uploads import Masks
from engine.execution.precision_check import PrecisionCheck, precision_of
from engine.execution.verification import Verification, on_device, on_host
from engine.memory.prefix_cache import AdapterKey
from engine.model.config import ModelConfig
from engine.model.delta_states import DeltaStates
from engine.model.kv_layers import AttentionByKind, KvLayers
from engine.model.rope import LayerRopes
from engine.model.weights import Weights, as_served, load_weights
from engine.sampling.logits import LogitsProcessor
from engine.sampling.sampler import Sampled
from engine.sequence import Step
from engine.stats import Precision
from kernels.attention_cpu import CpuAttention
from kernels.experts.lora import ExpertLora
from kernels.huge_pages import keep_freed_memory, lazy_zeros
from kernels.kv_pages import PageLayout
from kernels.lora.cpu import CpuLora

# Largest size of all copies of decoding adapters that make a CPU step fast; see
# kernels/lora/cpu.py.
_MAX_STACK_BYTES = 1 << 30


class ModelRunner:
    """Owns what the forward pass reads and writes.

    arena    [P, page_elems]; pages are handed out by `PagePool`
    base     the weights one by one, for adapters that depend on them
    weights  given, nothing is read from the model folder

    precision      of the weights, keys and values, and what it changes
    entry_buffers  where the adapters' table stays from one step to the next
    draft_heads    None: those of adapters are not used, as without speculation
    weights        what it runs, for a trainer; None: `EngineConfig.lends_weights` is not set
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, weights: Weights | None = None
    ) -> None:
        """Load the model. Raises UnsupportedModel, OutOfMemory, ValueError for the arena's size."""
        self._gpu: GpuRunner | None = None
        self._cpu_lora: CpuLora | None = None
        self._cpu_attention: list[CpuAttention] = []
        self.draft_heads: DraftHeads | None = None
        try:
            self._set_up(config, model, weights)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{config.device} is too small for the weights, the graphs and an arena of "
                f"{config.arena_bytes or 'any number of'} bytes"
            ) from error
        if config.speculation:
            owner = self._decoder if self._gpu is None else self._gpu
            self.draft_heads = DraftHeads(self.arena, owner.head_logits)

    def _set_up(self, config: EngineConfig, model: ModelConfig, weights: Weights | None) -> None:
        config.check_model(model)
        dtype = torch.float32 if config.dtype_name == "float32" else torch.bfloat16
        layout, weights, self.precision = _load(config, model, weights, dtype)
        self._layout = layout
        self.weights = weights if config.lends_weights else None
        make_gpu = functools.partial(
            GpuRunner,
            model=model,
            weights=weights,
            layout=layout,
            max_running=config.max_running,
            max_drafted=config.max_drafted_rows,
            max_tokens=config.max_step_tokens,
        )

        def profile_run(arena: torch.Tensor) -> int:
            return make_gpu(arena=arena, max_positions=config.context_limit(model)).profile_run()

        num_pages = arena_pages(config, model, profile_run)
        max_positions = config.position_limit(model, num_pages)
        self.arena = (
            lazy_zeros(num_pages, layout.page_elems, dtype=dtype)
            if config.is_cpu
            else torch.zeros(num_pages, layout.page_elems, dtype=dtype, device=config.device)
        )
        if config.runs_triton:
            self.base = BaseWeights(model, PlainWeights(weights))
            self._gpu = make_gpu(arena=self.arena, max_positions=max_positions)
            self.entry_buffers = self._gpu.entry_buffers
            if config.capture_graphs:
                self._gpu.warm_up()
            return
        self.entry_buffers = EntryBuffers(MAX_ENTRIES, self.arena.device)
        self._decoder, self._model = Decoder(model, weights), model
        self.base = BaseWeights(model, self._decoder)
        plan = model.plan
        rotations = [r for i, r in enumerate(plan.rotations) if i not in plan.delta_layers]
        self._rope = LayerRopes(model.head_dims, rotations, max_positions, self.arena.device)
        self._kv_layers = KvLayers(plan.shapes) if plan.shapes else None
        if config.is_cpu:
            keep_freed_memory()
        if config.is_cpu and dtype == torch.float32 and plan.delta is None and not plan.shapes:
            self._cpu_lora = CpuLora(
                arena=layout.tiles(self.arena),
                widths=model.projection_widths,
                num_layers=model.num_layers,
                max_bytes=_MAX_STACK_BYTES,
            )
        if config.is_cpu and dtype == torch.float32 and not layout.is_fp8:
            self._cpu_attention = self._attention_on_a_cpu()

    def _attention_on_a_cpu(self) -> list[CpuAttention]:
        """Return the attention of layers with heads of each shape."""
        plan = self._model.plan
        return [
            CpuAttention(
                ropes=ropes,
                arena=self.arena,
                layout=layout,
                num_heads=self._model.num_heads,
                windows=windows,
                scale=plan.attention_scale,
                growth=None if plan.growth is None else plan.growth.factors,
            )
            for layout, ropes, windows in self._kinds()
        ]

    def adapter_order(self, keys: Iterable[AdapterKey]) -> Mapping[Hashable, int]:
        """Return the order of adapters in which the step runs fastest; missing ones come last."""
        return {} if self._cpu_lora is None else self._cpu_lora.arrange(keys)

    def forget_adapter(self, digest: str) -> None:
        """Drop the adapter's copies outside the arena; they are made again if it still runs."""
        if self._cpu_lora is not None:
            self._cpu_lora.forget(lambda key: any(digest == part for part, _ in key))

    def launch(self, step: Step, batch: Batch | None, processor: LogitsProcessor) -> InFlightStep:
        """Start a step. A CPU runs it before this returns; a GPU is not waited for.

        batch  the step's inputs; None: replay the step before with `Step.new_pages`

        A GPU chooses the tokens if they follow from the logits and masks alone: at once, or, if
        there are masks, by `InFlightStep.choose`. If not, the host chooses them when they are read.
        By then the tokens of the step before are known.
        """
        gpu = self._gpu
        if batch is None:
            assert gpu is not None and step.new_pages is not None
            masks = processor.masks(step.sampling)
            return _chosen_on_device(step, gpu.replay(step.new_pages, masks), masks)
        step.sampling = sampling = [row.sequence for row in step.rows if row.samples]
        is_free = batch.scores is None and processor.needs_logits_alone(sampling)
        if step.has_drafts or batch.states is not None:
            return self._launch_drafted(step, batch, processor, is_free)
        if gpu is not None and is_free:
            masks = processor.masks(sampling)
            tokens = gpu.start(batch, processor.draw(sampling), masks)
            return _chosen_on_device(step, tokens, masks)
        logits = self.run(batch)
        read = functools.partial(processor.choose_live, logits, sampling)
        return InFlightStep(step=step, read=read, scores=batch.scores, is_done=gpu is None)

    def _launch_drafted(
        self, step: Step, batch: Batch, processor: LogitsProcessor, is_free: bool
    ) -> InFlightStep:
        tokens = None
        if self._gpu is not None and is_free:
            rows = [row for row in step.rows if row.samples]
            masks = processor.draft_masks(rows)
            tokens = self._gpu.start(batch, processor.draw_drafted(rows), masks)
            choose = on_device(_read(tokens, masks))
        else:
            choose = on_host(self.run(batch), processor)
        drafted = Verification(step.rows, choose, processor, batch.states)
        return InFlightStep(
            step=step,
            read=drafted.read,
            tokens=tokens,
            scores=batch.scores,
            is_done=self._gpu is None,
            drafted=drafted,
        )

    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits [N, V] of the sampling rows; write the step's KV to the arena."""
        if self._gpu is not None:
            return self._gpu.run(batch)
        states = None
        if batch.delta is not None:
            states = DeltaStates(batch.delta, batch.query_start, self.arena, self._model)
        return self._decoder(batch, self._attention(batch), self._adapters(batch), states)

    def _attention(self, batch: Batch) -> Attention:
        self._rope.extend_to(int(batch.context_lens.max()))
        if not self._cpu_attention:
            ropes = self._rope.layers
            return PagedAttention(batch, ropes, self.arena, self._layout, self._model)
        steps = [
            attention.plan(
                positions=batch.positions,
                slots=batch.slots,
                query_start=batch.query_start,
                context_lens=batch.context_lens,
                page_tables=batch.page_tables,
            )
            for attention in self._cpu_attention
        ]
        return steps[0] if self._kv_layers is None else AttentionByKind(steps, self._kv_layers)

    def _kinds(self) -> Iterator[tuple[PageLayout, Sequence[Any], tuple[int | None, ...]]]:
        """Yield layout, ropes and windows of layers with heads of each shape, by their places."""
        layers, ropes, windows = self._kv_layers, self._rope.layers, self._model.plan.windows
        if layers is None:
            yield self._layout, ropes, windows
            return
        for kind, layout in enumerate(layers.layouts(self._layout)):
            found = layers.by_place(kind, layout, windows) if windows else []
            yield layout, layers.by_place(kind, layout, ropes), tuple(found)

    def _adapters(self, batch: Batch) -> Adapters | None:
        if batch.lora is None:
            return None
        tiled: Adapters = (
            TiledAdapters(batch.lora, self._layout.tiles(self.arena))
            if self._cpu_lora is None
            else self._cpu_lora.prepare(batch.lora, batch.adapter_keys)
        )
        experts, extras = self._model.plan.experts, batch.lora.extras
        if experts is not None and any(batch.lora.has_experts):
            tiles, num_layers = self._layout.tiles(self.arena), self._model.num_layers
            tiled.experts = ExpertLora(batch.lora, tiles, num_layers, experts.num)
        return tiled if extras is None else ExtendedAdapters(tiled, extras, self.arena)


def _load(
    config: EngineConfig, model: ModelConfig, given: Weights | None, dtype: torch.dtype
) -> tuple[PageLayout, Weights, Precision]:
    """Return the pages' layout with the scales of keys and values, the weights, and a report."""
    layout = config.page_layout(model)
    weights, precision = _weights(config, model, given, dtype)
    if layout.is_fp8:
        layout = replace(layout, scales=weights.kv_scales)
    return layout, weights, precision


def _weights(
    config: EngineConfig, model: ModelConfig, given: Weights | None, dtype: torch.dtype
) -> tuple[Weights, Precision]:
    """Return the given weights, or those of the model folder, in the precision of the config."""
    in_fp8 = config.base_precision == "fp8"
    is_quantized = in_fp8 or model.scheme is not None or config.kv_precision == "fp8"
    check = None
    if is_quantized and config.precision_prompts:
        check = PrecisionCheck(config, model, dtype)
    if given is None:
        weights = load_weights(
            config.model_dir, model, config.device, dtype, in_fp8=in_fp8, watch=check
        )
    else:
        layers = as_served(
            given.embedding, given.layers, given.kv_scales, in_fp8=in_fp8, watch=check
        )
        weights = replace(given, layers=layers)
    if check is None:
        return weights, precision_of(config, model)
    return weights, check.finish(weights.norm, weights.lm_head)


def _chosen_on_device(step: Step, tokens: Tokens, masks: Masks | None) -> InFlightStep:
    return InFlightStep(step=step, read=_read(tokens, masks), tokens=tokens)


def _read(tokens: Tokens, masks: Masks | None) -> Callable[[], list[Sampled]]:
    return tokens.sampled if masks is None else functools.partial(masks.read, tokens.sampled)
