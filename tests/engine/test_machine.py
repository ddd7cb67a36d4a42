"""The whole engine under any interleaving of what callers and the world can do to it.

After every rule all owners agree; in the end every continuation has ended exactly once, with the
tokens that it has alone in a roomy engine, and no page is lost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine import (
    AdapterPart,
    DeadlineExceeded,
    Engine,
    EngineConfig,
    FinishReason,
    PinLimitExceeded,
    Priority,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
    UnknownAdapter,
)
from engine.errors import AdapterError
from engine.model.config import ModelConfig
from tests.engine.conftest import ADAPTERS, prompt, save_adapter
from tests.engine.model.families import save_family

KINDS = ["all-4", "qv-16", "ko-1", "mlp-rs"]
BROKEN = "broken"

# Three prompts, of which shorter ones are the beginnings of longer ones.
prompts = st.builds(
    lambda seed, length: prompt(seed, 130)[:length],
    st.integers(0, 2),
    st.sampled_from([1, 15, 16, 17, 40, 64, 120]),
)
blends = st.one_of(
    st.just({}),
    st.sampled_from(["one", "two", "three"]).map(lambda name: {name: 1.0}),
    st.just({"one": 0.5}),
    st.just({"one": 0.5, "two": 1.5}),
    st.just({BROKEN: 1.0}),
)
tenants = st.sampled_from(["a", "b"])


class Reference:
    """What a request generates alone in a roomy engine that caches nothing, remembered."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path]) -> None:
        self._engine = Engine(
            EngineConfig(model_dir=model_dir, arena_bytes=4 << 20, prefix_cache=False)
        )
        for kind in KINDS:
            for i in range(2):  # a blend may have the same kind twice
                self._engine.register_adapter(f"{kind}-{i}", adapters[kind])
        self._known: dict[Any, list[int]] = {}

    def tokens(
        self, token_ids: list[int], parts: tuple[AdapterPart, ...], seed: int | None
    ) -> list[int]:
        """Eight tokens; `parts` are those of KINDS, part i under "kind-i"; no seed: greedy."""
        key = (tuple(token_ids), parts, seed)
        if key not in self._known:
            self._engine.add(
                Request(
                    request_id="r", token_ids=token_ids, adapters=parts, sampling=sampling(8, seed)
                )
            )
            self._known[key] = found = []
            while self._engine.has_work():
                for output in self._engine.step():
                    found += output.token_ids
        return self._known[key]

    def close(self) -> None:
        self._engine.close()


def sampling(max_tokens: int, seed: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if seed is None else 1.3,
        top_p=0.9,
        seed=seed,
        ignore_eos=True,
    )


@dataclass(frozen=True)
class World:
    """What a game is played with.

    repeats  a prompt is so many times as long as it was drawn
    """

    model_dir: Path
    adapters: dict[str, Path]
    num_pages: int
    repeats: int = 1

    @property
    def arena_bytes(self) -> int:
        model = ModelConfig.from_folder(self.model_dir)
        return self.num_pages * EngineConfig(model_dir=self.model_dir).page_bytes(model)


class EngineMachine(RuleBasedStateMachine):
    """The rules; what it remembers is what a caller could."""

    def __init__(self, world: World, reference: Reference) -> None:
        super().__init__()
        self.world, self.reference = world, reference
        self.now = 1000.0
        self.folder = tempfile.TemporaryDirectory()
        self.engine: Engine
        self.requests: dict[str, Request] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], RequestOutput] = {}
        self.cancelled: set[str] = set()
        self.digests: dict[str, str] = {}  # name -> the digest that it means now, if registered
        self.kind_of: dict[str, str] = {}  # digest -> which of KINDS it is
        self.pins: list[tuple[list[int], str, tuple[AdapterPart, ...]]] = []

    @initialize(
        max_running=st.sampled_from([1, 3, 8]),
        max_step_tokens=st.sampled_from([8, 32, 200]),
        max_adapters=st.sampled_from([None, 2]),
        host_cache_bytes=st.sampled_from([0, 1 << 16, 1 << 24]),
        prefix_cache=st.sampled_from([True, True, False]),
        max_skips=st.sampled_from([0, 2]),
    )
    def start(self, **config: Any) -> None:
        self.engine = Engine(
            EngineConfig(
                model_dir=self.world.model_dir,
                arena_bytes=self.world.arena_bytes,
                max_wait_s=4.0,
                max_batch_wait_s=10.0,
                **config,
            ),
            clock=lambda: self.now,
        )
        for name, kind in zip(["one", "two", "three"], KINDS, strict=False):
            self._register(name, kind)
        self._register_broken()

    def _register(self, name: str, kind: str) -> None:
        self.digests[name] = digest = f"{kind}-{len(self.kind_of)}"
        self.kind_of[digest] = kind
        self.engine.register_adapter(digest, self.world.adapters[kind])

    def _register_broken(self) -> None:
        folder = Path(self.folder.name) / BROKEN
        folder.mkdir()
        for file in self.world.adapters["ko-1"].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        self.engine.register_adapter(BROKEN, folder)
        (folder / "adapter_model.safetensors").unlink()
        self.digests[BROKEN] = BROKEN

    def _parts(self, blend: dict[str, float]) -> tuple[AdapterPart, ...]:
        return tuple(
            AdapterPart(digest=self.digests.get(name, f"not {name}"), weight=weight)
            for name, weight in blend.items()
        )

    @rule(
        token_ids=prompts,
        blend=blends,
        tenant_id=tenants,
        n=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.integers(1, 8),
        seed=st.sampled_from([None, 5]),
        priority=st.sampled_from(Priority),
        patience=st.sampled_from([None, None, 1.5, 30.0]),
    )
    def add(
        self,
        token_ids: list[int],
        blend: dict[str, float],
        max_tokens: int,
        seed: int | None,
        patience: float | None,
        **fields: Any,
    ) -> None:
        request = Request(
            request_id=str(len(self.requests)),
            token_ids=token_ids * self.world.repeats,
            adapters=self._parts(blend),
            sampling=sampling(max_tokens, seed),
            deadline=None if patience is None else self.now + patience,
            **fields,
        )
        try:
            self.engine.add(request)
        except UnknownAdapter:
            assert any(name not in self.digests for name in blend)
        else:
            assert all(name in self.digests for name in blend)
            self.requests[request.request_id] = request

    @rule(name=st.sampled_from(["one", "two", "three", BROKEN]))
    def prefetch(self, name: str) -> None:
        try:
            self.engine.prefetch(self.digests.get(name, "never-was"))
        except UnknownAdapter:
            assert name not in self.digests

    @precondition(lambda self: self.requests)
    @rule(choose=st.randoms(use_true_random=False))
    def cancel(self, choose: Any) -> None:
        request_id = choose.choice(list(self.requests))
        self.engine.cancel(request_id)
        self.cancelled.add(request_id)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        for output in self.engine.step():
            key = (output.request_id, output.index)
            assert output.request_id in self.requests, "news of a request that never was"
            assert key not in self.ends, "news after the end"
            self.got.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[key] = output
        self.engine.check_integrity()
        self.now += 0.5

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(["one", "two", "three"]))
    def unregister(self, name: str) -> None:
        digest = self.digests.pop(name, "never-was")
        self.engine.unregister_adapter(digest)
        self.pins = [pin for pin in self.pins if all(p.digest != digest for p in pin[2])]

    @rule(name=st.sampled_from(["one", "two", "three"]), kind=st.sampled_from(KINDS))
    def replace(self, name: str, kind: str) -> None:
        """The name means another adapter from now on."""
        self.unregister(name)
        self._register(name, kind)

    @rule(token_ids=prompts, blend=blends, tenant_id=tenants)
    def pin(self, token_ids: list[int], blend: dict[str, float], tenant_id: str) -> None:
        parts = self._parts(blend)
        try:
            self.engine.pin_prefix(token_ids, tenant_id=tenant_id, adapters=parts)
        except PinLimitExceeded:
            assert self.pins or len(token_ids) // 16 > self.world.num_pages // 4
        except UnknownAdapter:
            assert any(name not in self.digests for name in blend)
        except RequestError as error:  # shorter than a page, or there is no prefix cache
            assert error.param == "token_ids"
        else:
            self.pins.append((token_ids, tenant_id, parts))

    @precondition(lambda self: self.pins)
    @rule(choose=st.randoms(use_true_random=False))
    def unpin(self, choose: Any) -> None:
        token_ids, tenant_id, parts = self.pins.pop(choose.randrange(len(self.pins)))
        self.engine.unpin_prefix(token_ids, tenant_id=tenant_id, adapters=parts)

    @invariant()
    def all_owners_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self._finish()
        finally:
            self.engine.close()
            self.folder.cleanup()

    def _finish(self) -> None:
        for token_ids, tenant_id, parts in self.pins:
            self.engine.unpin_prefix(token_ids, tenant_id=tenant_id, adapters=parts)
        num_steps = 0
        while self.engine.has_work():
            self._step()
            num_steps += 1
            assert num_steps < 5000, self.engine.stats()
        expected = {(r.request_id, i) for r in self.requests.values() for i in range(r.n)}
        assert self.ends.keys() == expected
        for (request_id, index), output in self.ends.items():
            self._check(self.requests[request_id], index, output)
        stats = self.engine.stats()
        assert (stats.kv_pages, stats.pinned_pages) == (0, 0)
        assert stats.free_pages == stats.num_pages - stats.adapter_pages

    def _check(self, request: Request, index: int, output: RequestOutput) -> None:
        """The end of one continuation has a cause, and its tokens are the right ones."""
        got = self.got[(request.request_id, index)]
        error = output.error
        if error is not None:
            assert output.finish_reason is FinishReason.ERROR
            if isinstance(error, DeadlineExceeded):
                assert request.deadline is not None
            else:
                assert isinstance(error, AdapterError), error
                assert any(part.digest == BROKEN for part in request.adapters)
        elif output.finish_reason is FinishReason.CANCELLED:
            assert request.request_id in self.cancelled
        else:
            assert output.finish_reason is FinishReason.LENGTH
            assert len(got) == request.sampling.max_tokens
        assert output.num_prompt_tokens == len(request.token_ids)
        assert output.num_generated == len(got)
        if got:
            parts = tuple(
                AdapterPart(digest=f"{self.kind_of[part.digest]}-{i}", weight=part.weight)
                for i, part in enumerate(request.adapters)
            )
            seed = request.sampling.seed
            seed = None if seed is None else seed + index
            wanted = self.reference.tokens(list(request.token_ids), parts, seed)
            assert got == wanted[: len(got)]


Play = Callable[..., None]


@pytest.fixture(scope="module")
def plain(tiny_model: Path, adapters: dict[str, Path]) -> World:
    return World(tiny_model, adapters, num_pages=40)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Prompts may be twice as long as the arena, and a request may need all of it for a moment."""
    folder = tmp_path_factory.mktemp("sliding")
    model_dir = save_family(folder / "base", "mistral", max_position_embeddings=512)
    adapters = {
        kind: save_adapter(model_dir, folder / kind, seed, **ADAPTERS[kind])
        for seed, kind in enumerate(KINDS)
    }
    return World(model_dir, adapters, num_pages=12, repeats=3)


@pytest.fixture(params=["plain", "sliding"])
def play(request: pytest.FixtureRequest) -> Any:
    """Play so many games of so many rules: always the same ones, or others each time."""
    world: World = request.getfixturevalue(request.param)
    reference = Reference(world.model_dir, world.adapters)

    def run(num_games: int, num_rules: int, *, same: bool) -> None:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: EngineMachine(world, reference),
            settings=settings(
                max_examples=num_games,
                stateful_step_count=num_rules,
                derandomize=same,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=not same,
            ),
        )

    yield run
    reference.close()


def test_any_interleaving(play: Play) -> None:
    play(20, 40, same=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_long_interleavings(play: Play) -> None:
    play(400, 80, same=False)
