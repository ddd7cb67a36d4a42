"""The adapter that a run starts from, as PEFT makes it."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.model.config import ModelConfig
from engine.training.parameters import AdapterLayout

# An 8B model's adapter of rank 16 takes a thread a quarter of a second, and 160 MB.
_THREADS = {"cpu": 1, "cuda": 4}


def draw_initial(layout: AdapterLayout, config: ModelConfig, seed: int) -> torch.Tensor:
    """Return a span [size] float32 as `get_peft_model` after `set_seed(seed)` fills it.

    A is random, B is zero. Equal to the bit: for each module in the model's order PEFT draws A and
    B as linear layers do, and then A again.
    """
    generator = torch.Generator().manual_seed(seed)
    span = torch.zeros(layout.size)
    for (layer, projection), (a, b) in layout.factors.items():
        in_width, out_width = config.widths(layer)[projection]
        drawn = span[a.offset : a.offset + a.size].view(a.rows, in_width)
        _kaiming(drawn, generator)
        _kaiming(torch.empty(out_width, b.columns), generator)
        _kaiming(drawn, generator)
    return span


def _kaiming(tensor: torch.Tensor, generator: torch.Generator) -> None:
    torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)


class InitialAdapters:
    """Draws initial adapters by run id, in threads, so that they are there when the runs begin.

    is_beside_steps  whether steps are made while a run waits for its adapter
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        # On a CPU drawing takes the time of the steps: making steps beside it gains nothing.
        self.is_beside_steps = device.type != "cpu"
        self._most = _THREADS[device.type]
        self._threads = ThreadPoolExecutor(self._most, "initial-adapters")
        self._drawn: dict[str, Future[torch.Tensor]] = {}

    @property
    def has_room(self) -> bool:
        """Return whether another adapter may be drawn ahead."""
        return len(self._drawn) < self._most

    def expect(self, run_id: str, layout: AdapterLayout, seed: int) -> None:
        """Begin to draw, unless it has begun."""
        if run_id not in self._drawn:
            drawn = self._threads.submit(draw_initial, layout, self._config, seed)
            self._drawn[run_id] = drawn

    def is_drawn(self, run_id: str, layout: AdapterLayout, seed: int) -> bool:
        """Begin to draw, and return whether the adapter is ready: `take` would not wait."""
        self.expect(run_id, layout, seed)
        return self._drawn[run_id].done()

    def take(self, run_id: str, layout: AdapterLayout, seed: int) -> torch.Tensor:
        """Wait until the run's span is drawn, and return it."""
        self.expect(run_id, layout, seed)
        return self._drawn.pop(run_id).result()

    def drop(self, run_id: str) -> None:
        """Forget a run that will not begin."""
        self._drawn.pop(run_id, None)
