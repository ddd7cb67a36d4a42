"""AdapterReader: reads a PEFT folder from disk into pages of host memory, on a loader thread.

The tensors file is read once, into a buffer that is used again. It is not memory-mapped: if another
process truncated a mapped file, this process would die. Each value is copied once, from the buffer
into its tile. At the same time another thread hashes the same bytes, which takes longer than all
the rest. So at every load, the bytes that were loaded are the bytes that were verified.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import torch

from contract.adapters import peft_config, safetensors_header
from contract.adapters.file_kinds import BIN_FILE, BIN_PICKLE, MLX_ADAPTER, MLX_FILE
from contract.adapters.safetensors_header import ENGINE_MAX_BYTES, LENGTH_BYTES, Tensor
from engine.adapters.base_weights import BaseWeights
from engine.adapters.config import MAX_CONFIG_BYTES, check_config, parse_config
from engine.adapters.fast_tiles import write_plain
from engine.adapters.host_memory import HostPages
from engine.adapters.host_values import clear
from engine.adapters.plan import AdapterPlan, parse_header, plan_adapter
from engine.adapters.threads import start_thread
from engine.adapters.tiles import TileMap, fill_tiles, place_tiles
from engine.errors import AdapterDamaged, AdapterMismatch, AdapterUnavailable
from engine.model.config import ModelConfig
from engine.request import ORIGINAL
from kernels import PageLayout

CONFIG_FILE, TENSORS_FILE = peft_config.FILE, safetensors_header.FILE

# Computes an adapter's digest from the text of its config and the hex sha256 of its tensors file.
# It may raise ValueError for a config that has no digest.
DigestOf = Callable[[bytes, str], str]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE_BYTES = 8 << 20
# Buffers up to this size are kept for the next adapter.
_MAX_KEPT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class _Start:
    """The facts about a folder that are known before its tensors are read."""

    plan: AdapterPlan
    config_text: bytes
    header: bytes  # the tensors file's header with its length
    tensors: Mapping[str, Tensor]  # by name, as the header describes them


class AdapterReader:
    """Reads adapters for one model; all methods may be called on any thread.

    base       the model's weights, on which some adapters depend
    digest_of  if given, `load` refuses files that do not have the expected digest
    reads_draft_heads  whether an adapter's draft heads get room and are read, or are left
    serves_experts     False: adapters of routed experts are refused
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: PageLayout,
        base: BaseWeights,
        digest_of: DigestOf | None = None,
        reads_draft_heads: bool = False,
        serves_experts: bool = True,
    ) -> None:
        self._serves_experts = serves_experts
        self._reads_draft_heads = reads_draft_heads
        self._model, self._layout, self._base = model, layout, base
        self._digest_of = digest_of
        #: True if a digest always means the same content.
        self.verifies = digest_of is not None
        self._buffers: deque[bytearray] = deque(maxlen=4)
        # One thread at a time: each takes Python's lock from the step loop many times.
        self._laying_out = threading.Lock()

    def read_plan(self, path: Path) -> AdapterPlan:
        """Read the plan of the PEFT folder `path`; raise AdapterMismatch or AdapterUnavailable."""
        try:
            with (path / TENSORS_FILE).open("rb", buffering=0) as file:
                return self._read_start(path, file).plan
        except OSError as error:
            refuse_other_formats(path)
            raise _unreadable(error) from error

    def place(self, plan: AdapterPlan, digest: str = "") -> TileMap:
        """Decide where the adapter's values go in its pages."""
        return place_tiles(
            plan,
            self._model,
            self._layout,
            has_draft_heads=self._reads_draft_heads,
            is_original=digest.endswith(ORIGINAL),
        )

    def load(self, digest: str, path: Path, room: HostPages) -> None:
        """Read the adapter into `room` and set its tiles and content.

        Raises AdapterUnavailable when it cannot be read, AdapterDamaged when its bytes are not
        those of `digest` or do not fit `room`, AdapterMismatch when they do not fit the model.
        """
        try:
            with (path / TENSORS_FILE).open("rb", buffering=0) as file:
                start = self._read_start(path, file)
                tiles = self.place(start.plan, digest)
                if tiles.num_pages != len(room.numbers):
                    raise AdapterDamaged("the adapter's files have changed since it was registered")
                buffer = self._buffer(start.plan.file_bytes - len(start.header))
                try:
                    room.content = self._load(digest, start, file, buffer, tiles, room)
                finally:
                    if len(buffer) <= _MAX_KEPT_BYTES:
                        self._buffers.append(buffer)
        except OSError as error:
            raise _unreadable(error) from error
        room.tiles = tiles

    def _load(
        self,
        digest: str,
        start: _Start,
        file: BinaryIO,
        buffer: bytearray,
        tiles: TileMap,
        room: HostPages,
    ) -> str:
        body = memoryview(buffer)[: start.plan.file_bytes - len(start.header)]
        pieces: SimpleQueue[memoryview | bytes] = SimpleQueue()
        pieces.put(start.header)
        hashing = start_thread(_sha256, pieces)
        try:
            _read_all(file, body, pieces)
            with self._laying_out:
                self._lay_out(start, body, tiles, room)
        finally:  # the hash reads the buffer until then; a wrong digest explains any other error
            pieces.put(b"")
            content = self._content(digest, start.config_text, hashing.result())
        return content

    def _lay_out(self, start: _Start, body: memoryview, tiles: TileMap, room: HostPages) -> None:
        for page in room.rows():
            clear(page)
        placed = tiles.at(room.numbers, self._layout.page_elems)
        left, packed = start.plan, room.open()
        if tiles.per_element == 1:
            left = write_plain(packed, left, placed, start.tensors, body, len(start.header))
        fill_tiles(packed, left, placed, _values(start, body), self._base)

    def _content(self, digest: str, config_text: bytes, tensors_sha256: str) -> str:
        """Return a hash that stands for the files' content.

        If there is a rule for digests, it is their digest; raises AdapterDamaged if that is not
        `digest`.
        """
        if self._digest_of is None:
            return hashlib.sha256(config_text + tensors_sha256.encode()).hexdigest()
        try:
            found = self._digest_of(config_text, tensors_sha256)
        except ValueError as error:
            raise AdapterDamaged(f"the adapter's files have no digest: {error}") from error
        if found != digest.removesuffix(ORIGINAL):
            raise AdapterDamaged(f"the adapter's files have digest {found}, not {digest}")
        return found

    def _read_start(self, path: Path, file: BinaryIO) -> _Start:
        with (path / CONFIG_FILE).open("rb") as config_file:
            config_text = config_file.read(MAX_CONFIG_BYTES + 1)
        config = parse_config(config_text)
        file_bytes = os.fstat(file.fileno()).st_size
        header = file.read(LENGTH_BYTES)
        header += file.read(min(int.from_bytes(header, "little"), ENGINE_MAX_BYTES))
        try:
            tensors = parse_header(header, file_bytes)
        except AdapterMismatch:
            check_config(config)  # a fault in the config may be the cause
            raise
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        plan = plan_adapter(config, shapes, self._model, file_bytes)
        if plan.num_experts and not self._serves_experts:
            name = next(each.a_name for each in plan.targets if each.site.expert is not None)
            raise AdapterMismatch(
                f"tensor {name} changes routed experts, which a GPU serves without adapters: use a "
                "worker on a CPU, or train other linears",
                param=name,
            )
        return _Start(plan, config_text, header, tensors)

    def _buffer(self, num_bytes: int) -> bytearray:
        """Return a buffer that no other load uses; allocating one takes longer than reading."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            return bytearray(num_bytes)
        return buffer if len(buffer) >= num_bytes else bytearray(num_bytes)


def refuse_other_formats(folder: Path) -> None:
    """Raise AdapterMismatch if the folder has tensors of another format only.

    A pickle may run code; mlx-lm's matrices are transposed.
    """
    if (folder / TENSORS_FILE).exists():
        return
    for file, message in ((BIN_FILE, BIN_PICKLE), (MLX_FILE, MLX_ADAPTER)):
        if (folder / file).is_file():
            raise AdapterMismatch(f"{file}: {message}")


def _unreadable(error: OSError) -> AdapterUnavailable:
    return AdapterUnavailable(f"the adapter cannot be read: {error.strerror or error}")


def _read_all(file: BinaryIO, buffer: memoryview, pieces: SimpleQueue[memoryview | bytes]) -> None:
    """Fill `buffer` from `file`, and put each part that was read into `pieces`.

    Raises AdapterMismatch if the file is shorter.
    """
    while len(buffer):
        count = file.readinto(buffer[:_PIECE_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise AdapterMismatch(f"{TENSORS_FILE} was truncated while it was read")
        pieces.put(buffer[:count])
        buffer = buffer[count:]


def _sha256(pieces: SimpleQueue[memoryview | bytes]) -> str:
    """Return the hex sha256 of all pieces up to an empty one."""
    hashed = hashlib.sha256()
    while piece := pieces.get():
        hashed.update(piece)
    return hashed.hexdigest()


def _values(start: _Start, body: memoryview) -> Callable[[str], torch.Tensor]:
    """Return a function that gives a tensor of the file by name, without copying it."""
    body_begin = len(start.header)

    def values(name: str) -> torch.Tensor:
        _, dtype, shape, begin, end = start.tensors[name]
        own = body[begin - body_begin : end - body_begin]
        return torch.frombuffer(own, dtype=_DTYPES[dtype]).view(shape)

    return values
