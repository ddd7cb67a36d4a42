"""The loss of held-out rows under many adapters at once: the forward pass alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.training.errors import RunRefused, RunUnsupported
from engine.training.model import TrainingModel
from engine.training.packer import cut_pieces, pack
from engine.training.parameters import AdapterLayout, Span
from engine.training.run import RunRows, RunSettings, unsupported
from engine.training.tables import SiteTables
from kernels.training import SPAN, Pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An adapter and the rows that it is judged by.

    settings  its rank, alpha and target_modules; nothing else of them counts
    adapter   its tensors by PEFT's names; None: the base itself
    """

    name: str
    rows: RunRows
    settings: RunSettings = field(default_factory=RunSettings)
    adapter: Mapping[str, torch.Tensor] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """token_losses  [answer tokens] float32 or wider, in the order of the rows, on the host"""

    name: str
    token_losses: torch.Tensor

    @property
    def mean(self) -> float:
        return float(self.token_losses.double().mean())


def held_out_losses(
    model: TrainingModel, judged: Iterable[Judged], *, token_budget: int, pool_elements: int
) -> Iterator[HeldOutLoss]:
    """Each adapter's loss of each answer token, teacher-forced; in the order in which they end.

    The rows of many adapters share a pass. `pool_elements` of the model's type hold the adapters
    that are under way. Raises RunRefused for an adapter or rows that do not fit the base.
    """
    passes = held_out_passes(model, judged, token_budget=token_budget, pool_elements=pool_elements)
    for ended in passes:
        yield from ended


def held_out_passes(
    model: TrainingModel, judged: Iterable[Judged], *, token_budget: int, pool_elements: int
) -> Iterator[list[HeldOutLoss]]:
    """`held_out_losses` a pass at a time, for who does other work between two: those that ended."""
    group: list[_Adapter] = []
    first = 0
    for each in judged:
        adapter = _Adapter(model, each, token_budget)
        if adapter.layout.size > pool_elements:
            problem = f"{each.name} has {adapter.layout.size} parameters"
            raise RunRefused(f"{problem}; there is room for {pool_elements}", param="rank")
        if first + adapter.layout.size > pool_elements:
            yield from _judge(model, group, first, token_budget)
            group, first = [], 0
        adapter.span = Span(first, adapter.layout.size)
        group.append(adapter)
        first += adapter.layout.size
    yield from _judge(model, group, first, token_budget)


class _Adapter:
    """One of those under way: its pieces that are still to come, its losses so far."""

    def __init__(self, model: TrainingModel, judged: Judged, budget: int) -> None:
        self.judged = judged
        lack = unsupported(judged.settings)
        if lack is not None:
            raise RunUnsupported(f"{lack.field}: {lack.reason}", param=lack.field)
        judged.settings.check()
        judged.rows.check(model.config)
        self.layout = AdapterLayout(model.config, judged.settings)
        if judged.adapter is not None:
            self.layout.check(judged.adapter)
        self.span = Span(0, self.layout.size)
        self.losses: list[torch.Tensor] = []
        self.pieces = cut_pieces(judged.rows, range(len(judged.rows)), budget, 1.0)


def _judge(
    model: TrainingModel, group: Sequence[_Adapter], size: int, budget: int
) -> Iterator[list[HeldOutLoss]]:
    values = torch.zeros(max(size, SPAN), dtype=model.dtype, device=model.device)
    pools = Pools(values, values, values, values, values)  # nothing but `values` is read
    for adapter in group:
        if adapter.judged.adapter is not None:
            adapter.layout.fill(values, adapter.span.first, adapter.judged.adapter)
    tables = SiteTables(model.config, model.device)
    left = list(group)
    while left:
        chosen = _fill(left, budget)
        batch = pack([adapter.pieces.pop(0) for adapter in chosen], model.device)
        sites = tables.of([(adapter.layout, adapter.span) for adapter in chosen])
        losses = model.token_losses(batch, sites, pools).cpu()
        parts = torch.split(losses, batch.answer_counts.tolist())
        ended = []
        for adapter, part in zip(chosen, parts, strict=True):
            adapter.losses.append(part)
            if not adapter.pieces:
                left.remove(adapter)
                token_losses = torch.cat(adapter.losses)
                ended.append(HeldOutLoss(name=adapter.judged.name, token_losses=token_losses))
        yield ended


def _fill(left: Sequence[_Adapter], budget: int) -> list[_Adapter]:
    """Return the first adapter, and each further one whose next piece fits into the budget."""
    chosen: list[_Adapter] = []
    for adapter in left:
        tokens = adapter.pieces[0].num_tokens
        if not chosen or tokens <= budget:
            chosen.append(adapter)
            budget -= tokens
    return chosen
