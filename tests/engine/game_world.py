"""What games are played with: models, adapters, a disk, and threads that the game moves itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engine import AdapterPart, Engine, EngineConfig, Priority, Request, SamplingParams
from engine.model.config import ModelConfig
from tests.engine.conftest import ADAPTERS, Result, prompt, run, save_adapter
from tests.engine.model.families import save_family

#: Of ADAPTERS: small ones, some with gains or embeddings, and one too large for any game's arena.
KINDS = ("all-4", "qv-16", "ko-1", "mlp-rs", "dora", "ends", "all-64")
MAX_PARTS = 4
MAX_CONTEXT = 512
#: Shorter prompts are the beginnings of longer ones, so that pages are shared.
PROMPTS = tuple(prompt(seed, MAX_CONTEXT) for seed in range(3))
SHORT = (1, 15, 16, 17, 33, 40, 64, 120)
#: Longer than most arenas, which only a model with windows takes; the last leaves room for one.
LONG = (200, 300, 400, 510, 511)
SEED = 5


def kind_of(digest: str) -> str:
    """Which of KINDS an adapter of a game is."""
    return digest.rsplit("-", 1)[0]


class Alone:
    """What requests generate alone in a roomy engine that caches nothing, remembered."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path]) -> None:
        self._engine = Engine(
            EngineConfig(
                model_dir=model_dir, arena_bytes=16 << 20, prefix_cache=False, max_step_tokens=2048
            )
        )
        for kind in KINDS:
            for i in range(MAX_PARTS):  # a blend may have the same kind several times
                self._engine.register_adapter(f"{kind}-{i}", adapters[kind])
        self._known: dict[str, Result] = {}

    def run(self, request: Request, index: int) -> Result:
        """Everything that continuation `index` of a game's request puts out."""
        alone = replace(
            request,
            request_id="alone",
            n=1,
            tenant_id="",
            deadline=None,
            priority=Priority.INTERACTIVE,
            sampling=replace(request.sampling, seed=SEED + index),
            adapters=tuple(
                AdapterPart(digest=f"{kind_of(part.digest)}-{i}", weight=part.weight)
                for i, part in enumerate(request.adapters)
            ),
        )
        key = repr(alone)
        if key not in self._known:
            self._known[key] = run(self._engine, alone)["alone"]
        return self._known[key]

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class World:
    """One model and its adapters.

    adapters  one of KINDS -> its PEFT folder
    lengths   of prompts, each as likely as the others
    more_pages  of every game's arena, for states
    """

    name: str
    model_dir: Path
    adapters: dict[str, Path]
    lengths: tuple[int, ...] = (*SHORT, *SHORT, 511)
    more_pages: int = 0

    @cached_property
    def page_bytes(self) -> int:
        model = ModelConfig.from_folder(self.model_dir)
        return EngineConfig(model_dir=self.model_dir).page_bytes(model)

    @cached_property
    def alone(self) -> Alone:
        return Alone(self.model_dir, self.adapters)


def save_world(folder: Path, family: str, **fields: Any) -> World:
    """A World whose model is of one of FAMILIES."""
    model_dir = save_family(folder / "base", family, max_position_embeddings=MAX_CONTEXT)
    adapters = {
        kind: save_adapter(model_dir, folder / kind, seed, **ADAPTERS[kind])
        for seed, kind in enumerate(KINDS)
    }
    return World(family, model_dir, adapters, **fields)


@dataclass
class _Piece:
    """Work for a thread. It is done after so many steps; None: when it is let go."""

    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    path: Path | None
    steps_left: int | None


class Threads:
    """Stands for the engine's threads: what they do is done between steps, as the game draws it.

    failing   folders that cannot be read
    hanging   those of which nobody ever hears again
    gone      those that were removed: who has begun to read one goes on
    troubled  digests of adapters that could not be read at once, at some time
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._delays = (0, 0, 1, 3, 8) if chance.random() < 0.5 else (0,)
        self._pieces: list[_Piece] = []
        self.failing: set[Path] = set()
        self.hanging: set[Path] = set()
        self.gone: set[Path] = set()
        self.troubled: set[str] = set()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """In place of `start_thread`; what has a path reads the adapter, its first argument."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        path = next((arg for arg in args if isinstance(arg, Path)), None)
        if path in self.gone:
            future.set_exception(FileNotFoundError(path))
            return future
        delay = None if path in self.hanging else self._chance.choice(self._delays)
        if path is not None and delay != 0:
            self.troubled.add(args[0])
        self._pieces.append(_Piece(future, function, args, path, delay))
        return future

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """In place of an executor's, as is `shutdown`."""
        return self(function, *args)

    def shutdown(self, **options: Any) -> None:
        pass

    def move_on(self) -> None:
        """One step's time."""
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            if piece.steps_left == 0:
                self._do(piece)
                continue
            if piece.steps_left is not None:
                piece.steps_left -= 1
            self._pieces.append(piece)

    def heal(self, path: Path) -> None:
        """The folder can be read again, also by who has been waiting for it."""
        self.failing.discard(path)
        self.hanging.discard(path)
        for piece in self._pieces:
            if piece.path == path and piece.steps_left is None:
                piece.steps_left = 0

    def end(self) -> None:
        """Do all that is left."""
        while self._pieces:
            self._do(self._pieces.pop())

    def _do(self, piece: _Piece) -> None:
        try:
            if piece.path in self.failing:
                self.troubled.add(piece.args[0])
                raise OSError("the disk is in trouble")
            piece.future.set_result(piece.function(*piece.args))
        except Exception as error:
            piece.future.set_exception(error)


def draw_config(chance: random.Random, world: World) -> EngineConfig:
    """Memories and limits so small that requests are in each other's way."""
    page = world.page_bytes
    limits: dict[str, Any] = {}
    if chance.random() < 0.3:
        limits["max_adapter_bytes"] = page * chance.choice([2, 3, 4, 6, 8])
    if chance.random() < 0.3:
        limits["min_kv_bytes"] = page * chance.choice([1, 2, 3])
    if chance.random() < 0.2:
        limits["min_adapter_bytes"] = page * chance.choice([1, 2])
    return EngineConfig(
        model_dir=world.model_dir,
        arena_bytes=page * (chance.choice([6, 8, 10, 12, 16, 24, 40]) + world.more_pages),
        host_cache_bytes=chance.choice([0, page, 2 * page, 3 * page, 8 * page, 1 << 24]),
        max_running=chance.choice([1, 2, 3, 8]),
        max_step_tokens=chance.choice([4, 8, 32, 200]),
        max_adapters=chance.choice([None, None, 1, 2]),
        prefix_cache=chance.choice([True, True, False]),
        pin_share=chance.choice([0.25, 0.5, 1.0]),
        loader_threads=chance.choice([1, 2, 3]),
        max_prefetch=chance.choice([1, 2, 16]),
        load_timeout_s=chance.choice([3.0, 6.0]),
        max_skips=chance.choice([0, 2, 64]),
        max_wait_s=chance.choice([1.0, 4.0, 1e9]),
        max_batch_wait_s=chance.choice([2.0, 10.0, 1e9]),
        **limits,
    )


def draw_prompt(chance: random.Random, lengths: Sequence[int]) -> list[int]:
    return chance.choice(PROMPTS)[: chance.choice(lengths)]


def draw_sampling(chance: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=chance.choice([1, 1, 2, 4, 8, 8, 30, None if chance.random() < 0.2 else 16]),
        temperature=chance.choice([0.0, 0.0, 1.3]),
        top_p=0.9,
        seed=SEED,
        repetition_penalty=1.2 if chance.random() < 0.1 else 1.0,
        logprobs=2 if chance.random() < 0.1 else None,
        stop_token_ids=tuple(chance.sample(range(257), 60)) if chance.random() < 0.2 else (),
        ignore_eos=chance.random() < 0.7,
        min_tokens=3 if chance.random() < 0.1 else 0,
    )


def draw_regex(chance: random.Random) -> str | None:
    return chance.choice(["[ab]{3}", "x+", "(yes|no)"]) if chance.random() < 0.08 else None
