"""PrecisionCheck: what quantisation changes in a base's logits, found out while it is loaded.

The hidden states of a few hundred tokens go through each layer when it has been read: once through
the weights as they were read (those of a quantised checkpoint dequantised), activations, keys and
values in the engine's own type; once with everything as it is served; and once for each kind with
only that kind as it is served: `attention` (the matrices qkv and o), `mlp` (gate, up and down) and
`kv` (keys and values). At the end all of them go through the last norm and the head, and their
logits are compared. So no more than one layer is there twice. The head is never quantised, thus it
is no kind. A GPU multiplies with the kernels that serve, a CPU with their reference arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from engine.config import EngineConfig
from engine.execution.batch import Batch
from engine.execution.decoder import DecoderLayer, Linear, PagedAttention, add_norm
from engine.model.config import ModelConfig
from engine.model.quantization import Int4Scheme
from engine.model.rope import LayerRopes
from engine.model.weights import LINEARS, KvScales, LayerWeights, Matrix, dense
from engine.stats import Comparison, Precision
from kernels.backend import use_triton
from kernels.fp8 import Fp8Matrix, apply_scales_triton, fp8_product, quantize_rows_triton
from kernels.int4 import Int4Matrix, int4_linear

_KINDS = {"attention": ("qkv", "o"), "mlp": ("gate_up", "down")}
#: Rows whose logits are compared at a time: two tables of 64 x 128,000 in fp32 take 64 MB.
_ROWS = 64
#: What a difference that is no finite number counts as.
_MOST = 1e6


def precision_of(config: EngineConfig, model: ModelConfig) -> Precision:
    """Return the precision in which the engine serves, with nothing compared."""
    if isinstance(model.scheme, Int4Scheme):
        weights = "int4"
    else:
        is_fp8 = model.scheme is not None or config.base_precision == "fp8"
        weights = "fp8" if is_fp8 else config.dtype_name
    return Precision(
        weights=weights,
        kv=config.kv_precision or config.dtype_name,
        adapters=config.adapter_precision or config.dtype_name,
    )


class PrecisionCheck:
    """Follows the loading of one base; see `engine.model.weights.Watch`."""

    def __init__(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._model, self._dtype = config, model, dtype
        prompts = [ids[: config.context_limit(model)] for ids in config.precision_prompts]
        self._batch = _batch(prompts, config.page_size, config.device)
        device = torch.device(config.device)
        longest = max(map(len, prompts))
        self._ropes = LayerRopes(model.head_dim, model.plan.rotations, longest, device)
        self._ropes.extend_to(longest)
        has_fp8_kv = config.kv_precision == "fp8"
        self._kinds = ["reference", "all", *_KINDS, *(["kv"] if has_fp8_kv else [])]
        self._plain = self._served = self._attention(None, ())
        self._states: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._index = 0

    def _attention(self, kv_precision: str | None, kv_scales: KvScales) -> PagedAttention:
        layout = replace(self._config, kv_precision=kv_precision).page_layout(self._model)
        if layout.is_fp8:
            layout = replace(layout, scales=kv_scales)
        num_pages = int(self._batch.page_tables.max()) + 1
        shape = num_pages, layout.page_elems
        arena = torch.zeros(shape, dtype=self._dtype, device=self._config.device)
        return PagedAttention(self._batch, self._ropes.layers, arena, layout, self._model)

    @torch.inference_mode()
    def begin(self, embedding: torch.Tensor, kv_scales: KvScales) -> None:
        self._served = self._attention(self._config.kv_precision, kv_scales)
        hidden = functional.embedding(self._batch.token_ids, embedding)
        hidden = self._model.plan.embedded(hidden)
        self._states = {kind: (hidden.clone(), None) for kind in self._kinds}

    @torch.inference_mode()
    def follow(self, before: LayerWeights, after: LayerWeights) -> None:
        plain: dict[str, Any] = {
            name: dense(getattr(before, name), self._dtype) for name in LINEARS
        }
        reference = replace(before, **plain)
        for kind, (hidden, residual) in self._states.items():
            names = LINEARS if kind == "all" else _KINDS.get(kind, ())
            weights = replace(reference, **{name: getattr(after, name) for name in names})
            layer = DecoderLayer(
                self._model,
                self._index,
                weights,
                may_pack=False,
                linear=_Served,
                dtype=self._dtype,
            )
            attention = self._served if kind in ("all", "kv") else self._plain
            self._states[kind] = layer(hidden, residual, attention, None)
        self._index += 1

    @torch.inference_mode()
    def finish(self, norm: torch.Tensor, lm_head: torch.Tensor) -> Precision:
        """Compare the logits; the states are let go."""
        states, self._states = self._states, {}
        normed = {}
        for kind, (hidden, residual) in states.items():
            assert residual is not None
            normed[kind], _ = add_norm(hidden, residual, norm, self._model.plan)
        reference = normed.pop("reference")

        def logits(x: torch.Tensor) -> torch.Tensor:
            return self._model.plan.scaled(functional.linear(x, lm_head)).float()

        was_quantised = self._model.scheme is not None
        return replace(
            precision_of(self._config, self._model),
            compared_with="checkpoint" if was_quantised else self._config.dtype_name,
            num_tokens=len(reference),
            kinds={kind: _compare(reference, x, logits) for kind, x in normed.items()},
        )


class _Served(Linear):
    """A linear as a GPU serves it; on a CPU a `Linear`."""

    def __init__(
        self,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        *,
        may_pack: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._matrix = None
        if isinstance(weight, Fp8Matrix | Int4Matrix):
            stored = weight.numbers if isinstance(weight, Fp8Matrix) else weight.packed
            if use_triton(stored):
                self._matrix, self.bias = weight, bias
                return
        super().__init__(weight, bias, may_pack=may_pack, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self._matrix, Int4Matrix):
            return int4_linear(x, self._matrix, self.bias)
        if self._matrix is not None:
            rows = quantize_rows_triton(x.contiguous(), self._matrix.input_scale)
            return apply_scales_triton(*fp8_product(rows, self._matrix, x.dtype), self.bias)
        return super().__call__(x)


def _batch(prompts: list[tuple[int, ...]], page_size: int, device: str) -> Batch:
    """Return the prompts as one prefill, with pages from 0 on."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    num_pages = [-(-len(ids) // page_size) for ids in prompts]
    firsts = [0, *accumulate(num_pages)]
    tables = np.zeros((len(prompts), max(num_pages)), np.int32)
    for row, (first, count) in enumerate(zip(firsts, num_pages, strict=False)):
        tables[row, :count] = range(first, first + count)
    positions = np.concatenate([np.arange(length) for length in lengths])
    bases = np.repeat(np.array(firsts[:-1]) * page_size, lengths)
    starts = np.array([0, *accumulate(lengths.tolist())], np.int32)

    def put(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    return Batch(
        token_ids=put([token for ids in prompts for token in ids], torch.int64),
        positions=put(positions, torch.int64),
        slots=put(bases + positions, torch.int64),
        query_start=put(starts, torch.int32),
        context_lens=put(lengths, torch.int32),
        max_new=int(lengths.max()),
        page_tables=put(tables, torch.int32),
        sample_rows=put([], torch.int64),
        lora=None,
        adapter_keys=(),
        lengths=lengths,
        contexts=lengths,
    )


def _compare(
    reference: torch.Tensor, x: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
) -> Comparison:
    """Compare the logits of the heads' inputs [T, E]."""
    kl = agreed = error = 0.0
    for wanted, got in zip(torch.split(reference, _ROWS), torch.split(x, _ROWS), strict=True):
        p, q = logits(wanted), logits(got)
        agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
        error = max(error, _finite((p - q).abs().max()))
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        kl += _finite((p.exp() * (p - q)).sum())
    count = len(reference)
    # Rounding may leave the sum of equal ones below zero.
    return Comparison(kl=max(0.0, kl / count), agreement=agreed / count, logit_error=error)


def _finite(value: torch.Tensor) -> float:
    number = float(value)
    return min(number, _MOST) if math.isfinite(number) else _MOST
