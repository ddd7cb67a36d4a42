"""Reading a PEFT folder from disk and copying it into pages: what the loader threads do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from engine.adapter_format import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    AdapterPlan,
    parse_config,
    parse_header,
    plan_adapter,
)
from engine.adapter_tiles import TileMap, fill_tiles, place_tiles
from engine.config import ModelConfig
from engine.errors import AdapterMismatch, AdapterUnavailable
from kernels import PageLayout

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter read into host memory: an image of its pages, and where its tiles lie in it."""

    image: torch.Tensor  # [num_pages, page_elems]
    tiles: TileMap

    @property
    def num_bytes(self) -> int:
        return self.image.numel() * self.image.element_size()


def read_plan(path: Path, model: ModelConfig) -> AdapterPlan:
    """The plan of the PEFT folder `path`; raises AdapterMismatch or AdapterUnavailable."""
    try:
        with (path / CONFIG_FILE).open("rb") as file:
            config = parse_config(file.read(MAX_CONFIG_BYTES + 1))
        tensors_path = path / TENSORS_FILE
        file_bytes = tensors_path.stat().st_size
        with tensors_path.open("rb") as file:
            start = file.read(8)
            start += file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
    except OSError as error:
        raise AdapterUnavailable(f"the adapter cannot be read: {error.strerror}") from error
    return plan_adapter(config, parse_header(start, file_bytes), model, file_bytes)


def load_adapter(
    path: Path, model: ModelConfig, layout: PageLayout, arena: torch.Tensor
) -> HostAdapter:
    """Read an adapter into an image of its pages, in `arena`'s dtype."""
    plan = read_plan(path, model)
    tiles = place_tiles(plan, model, layout)
    image = torch.zeros(
        tiles.num_pages, layout.page_elems, dtype=arena.dtype, pin_memory=arena.is_cuda
    )
    with safe_open(path / TENSORS_FILE, framework="pt") as file:
        fill_tiles(image, plan, tiles, file.get_tensor)
    if not torch.isfinite(image).all():
        raise AdapterMismatch("the adapter has values that are not finite")
    return HostAdapter(image, tiles)


def copy_pages(image: torch.Tensor, arena: torch.Tensor, pages: list[int]) -> None:
    """Copy image page i to arena page `pages[i]`, beside the steps that read other pages."""
    if not arena.is_cuda:
        for source, page in zip(image, pages, strict=True):
            arena[page].copy_(source)
        return
    stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for source, page in zip(image, pages, strict=True):
            arena[page].copy_(source, non_blocking=True)
    stream.synchronize()
