"""The adapter that a run starts from, as PEFT makes it."""

from __future__ import annotations

import math

import torch

from engine.model.config import ModelConfig
from engine.training.parameters import AdapterLayout


def fill_initial(
    layout: AdapterLayout, config: ModelConfig, seed: int, pool: torch.Tensor, first: int
) -> None:
    """Write into a span what `get_peft_model` after `set_seed(seed)` makes: A random, B zero.

    To the bit, if the pool is float32: for each module in the model's order PEFT draws A and B as
    linear layers do, and then A again.
    """
    generator = torch.Generator().manual_seed(seed)
    for (_, projection), (a, b) in layout.factors.items():
        in_width, out_width = config.projection_widths[projection]
        drawn = torch.empty(a.rows, in_width)
        _kaiming(drawn, generator)
        _kaiming(torch.empty(out_width, a.rows), generator)
        _kaiming(drawn, generator)
        start = first + a.offset
        pool[start : start + a.size].copy_(drawn.view(-1))
        start = first + b.offset
        pool[start : start + b.size].zero_()


def _kaiming(tensor: torch.Tensor, generator: torch.Generator) -> None:
    torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
