"""One random game against the engine: `play(seed, worlds, folder)`.

The game is everybody at once: callers with requests, pins and cancellations, an operator who
replaces adapters, a disk that fails and hangs, the clock. Memories are tiny, so that all of it
meets. Threads are the game's own: a seed is the same game every time. After every move all owners
agree; in the end every continuation has ended once, for a reason and with the tokens that it has
alone, and nothing is left of anybody.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from engine import (
    AdapterPart,
    DeadlineExceeded,
    Engine,
    FinishReason,
    KeptPrefix,
    OutOfPages,
    PinLimitExceeded,
    Priority,
    Request,
    RequestError,
)
from engine.errors import AdapterError
from engine.memory.page_pool import PageUse
from tests.engine.conftest import Result
from tests.engine.execution.ahead_runner import AheadRunner
from tests.engine.game_world import (
    KINDS,
    MAX_PARTS,
    Threads,
    World,
    draw_config,
    draw_prompt,
    draw_regex,
    draw_sampling,
    kind_of,
)

NAMES = ("one", "two", "three", "four")
NUM_MOVES = 120
STEP_S = 0.5
#: The longest game that was ever seen needed 700 steps to end.
MAX_STEPS = 3000

Key = tuple[str, int]
Pin = tuple[list[int], str, tuple[AdapterPart, ...]]


@dataclass(frozen=True)
class Score:
    """What was played: for reports, and to see that games are about something."""

    num_requests: int
    num_steps: int
    ends: Counter[str]


def play(seed: int, worlds: Sequence[World], folder: Path, *, pins_adapters: bool) -> Score:
    """Play one game, the same for the same seed; `folder` is its disk, an empty one."""
    game = Game(seed, worlds, folder, pins_adapters=pins_adapters)
    try:
        with (
            patch("engine.adapters.loader.start_thread", game.threads),
            patch("engine.adapters.copies.start_thread", game.threads),
            patch("engine.engine._IDLE_WAIT_S", 0.0),
        ):
            game.play()
        ends = Counter(game.judge(key) for key in game.results)
    except Exception as error:
        error.add_note(game.describe())
        raise
    finally:
        game.close()
    return Score(len(game.requests), game.num_steps, ends)


class Game:
    """An engine in a small world, the moves, and what those who make them remember.

    pins_adapters  whether adapters are pinned and brought to the arena between the moves, which
                   stay the same
    """

    def __init__(
        self, seed: int, worlds: Sequence[World], folder: Path, *, pins_adapters: bool
    ) -> None:
        self._pin_chance = random.Random(~seed) if pins_adapters else None
        self.seed, self.chance = seed, random.Random(seed)
        self.world = self.chance.choice(worlds)
        self.now, self.num_steps = 1000.0, 0
        self.threads = Threads(self.chance)
        drafts = random.Random(-seed - 7).random() < 0.5  # of its own: the moves stay the same
        has_states = self.world.more_pages > 0  # which are never taken back
        drafts &= not has_states
        self._config = replace(draw_config(self.chance, self.world), speculation=drafts)
        self.engine = Engine(self._config, clock=lambda: self.now)
        self.engine._grammars._compiler._threads = self.threads  # type: ignore[assignment]
        self._reads_ahead = self.chance.random() < 0.5 and not has_states
        if self._reads_ahead:
            AheadRunner(self.engine)
        self.folder = folder
        self.requests: dict[str, Request] = {}
        self.results: dict[Key, Result] = {}
        self._cancelled: set[Key] = set()
        self._rooms: dict[str, int] = {}  # request id -> pages that its adapters may need
        self._pinned: dict[Key, int] = {}  # when it ended, pages that pins held
        self._num_registered = 0
        self._digests: dict[str, str] = {}  # name -> what it means now
        self._paths: dict[str, Path] = {}  # digest -> its folder
        self._pins: list[Pin] = []

    def describe(self) -> str:
        ahead = "tokens are chosen ahead" if self._reads_ahead else "tokens are chosen in turn"
        return (
            f"seed {self.seed}: {self.world.name}, {ahead}, step {self.num_steps}\n{self._config}"
        )

    def play(self) -> None:
        for name, kind in zip(NAMES, self.chance.sample(KINDS, len(NAMES)), strict=True):
            self._register(name, kind)
        moves, weights = [move for move, _ in self._MOVES], [weight for _, weight in self._MOVES]
        for move in self.chance.choices(moves, weights, k=NUM_MOVES):
            move(self)
            self.engine.check_integrity()
            if self._pin_chance is not None and self._pin_chance.random() < 0.15:
                move = self._pin_chance.choice([self._pin_adapters, self._keep_prefixes])
                move(self._pin_chance)
                self.engine.check_integrity()
        self._end()

    def close(self) -> None:
        self.threads.end()
        self.engine.close()

    # Moves

    def _add(self) -> None:
        request = Request(
            request_id=str(len(self.requests)),
            token_ids=draw_prompt(self.chance, self.world.lengths),
            sampling=draw_sampling(self.chance),
            n=self.chance.choice([1, 1, 1, 2, 3]),
            adapters=self._draw_blend(),
            tenant_id=self.chance.choice("ab"),
            regex=draw_regex(self.chance),
            deadline=self._draw_deadline(),
            priority=self.chance.choice(list(Priority)),
        )
        digests = [part.digest for part in request.adapters]
        room = self.engine._store.most_pages(digests)
        try:
            self.engine.add(request)
        except OutOfPages:
            num_tokens = len(request.token_ids) + 1
            num_pinned = self.engine._pins.num_lasting_pages
            assert not self._has_room(num_tokens, room, num_pinned), "refused though it fits"
        except RequestError as error:
            most = self._config.max_adapters
            assert error.param == "adapters" and most is not None and len(digests) > most
        else:
            self.requests[request.request_id] = request
            # Beside others a tail may have come to lie in two pages, and stays there without them.
            known = self.engine._store._adapters
            num_tails = sum(known[digest].tail_sub_pages > 0 for digest in digests)
            self._rooms[request.request_id] = room + num_tails
            self.results |= {(request.request_id, i): Result() for i in range(request.n)}

    def _step(self) -> None:
        self.num_steps += 1
        self.threads.move_on()
        for output in self.engine.step():
            key = (output.request_id, output.index)
            self.results[key].add(output)
            if output.finish_reason is not None:
                self._pinned[key] = self.engine._pins.num_lasting_pages
        self.engine.check_integrity()
        self.now += STEP_S

    def _some_steps(self) -> None:
        for _ in range(self.chance.choice([1, 1, 2, 5])):
            self._step()

    def _time_passes(self) -> None:
        self.now += self.chance.choice([1.0, 20.0])

    def _cancel(self) -> None:
        if not self.requests:
            return
        request = self.chance.choice(list(self.requests.values()))
        index = self.chance.choice([None, *range(request.n)])
        self.engine.cancel(request.request_id, index=index)
        indices = range(request.n) if index is None else [index]
        self._cancelled |= {(request.request_id, i) for i in indices}

    def _prefetch(self) -> None:
        if digest := self._draw_digest():
            self.engine.prefetch(digest)

    def _pin_adapters(self, chance: random.Random) -> None:
        known = [*self._digests.values()]
        wanted = [chance.choice([*known, "never-was"]) for _ in range(chance.randrange(4))]
        if known and chance.random() < 0.5:
            self.engine.prefetch(chance.choice(known), to_arena=True)
        else:
            self.engine.pin_adapters([(chance.choice("ab"), digest) for digest in wanted])

    def _keep_prefixes(self, chance: random.Random) -> None:
        """A few prefixes, some of which requests and pins have too."""
        wanted = []
        for number in range(chance.randrange(4)):
            length = chance.choice([5, 16, 40, 120])
            digests = chance.sample([*self._digests.values()], min(1, len(self._digests)))
            wanted.append(
                KeptPrefix(
                    name=f"kept {number}",
                    tenant_id=chance.choice("ab"),
                    adapters=tuple(AdapterPart(digest=digest) for digest in digests),
                    token_ids=tuple(draw_prompt(chance, (length,))),
                )
            )
        self.engine.keep_prefixes(wanted)

    def _replace(self) -> None:
        """A name means another adapter from now on, or the same one from elsewhere, or nothing."""
        name, whim = self.chance.choice(NAMES), self.chance.random()
        digest = self._digests.pop(name, "never-was")
        self.engine.unregister_adapter(digest)
        self._pins = [pin for pin in self._pins if all(p.digest != digest for p in pin[2])]
        if whim < 0.7:
            self._register(name, self.chance.choice(KINDS))
        elif whim < 0.9 and digest in self._paths:
            self.threads.gone.add(self._paths[digest])
            self._register(name, kind_of(digest), digest)

    def _trouble(self) -> None:
        """The disk fails, or hangs, or is well again, where an adapter is."""
        digest = self._draw_digest()
        if not digest:
            return
        path = self._paths[digest]
        match self.chance.choice(["fails", "hangs", "is well"]):
            case "fails":
                self.threads.failing.add(path)
            case "hangs":
                self.threads.hanging.add(path)
            case "is well":
                self.threads.heal(path)
                if self.chance.random() < 0.3:
                    self.engine.register_adapter(digest, path)

    def _pin(self) -> None:
        pin = (
            draw_prompt(self.chance, (10, 16, 33, 64)),
            self.chance.choice("ab"),
            self._draw_blend(),
        )
        token_ids, tenant_id, parts = pin
        try:
            self.engine.pin_prefix(token_ids, tenant_id=tenant_id, adapters=parts)
        except (PinLimitExceeded, OutOfPages, RequestError):  # of which other tests tell more
            return
        self._pins.append(pin)

    def _unpin(self) -> None:
        if self._pins:
            token_ids, tenant_id, parts = self._pins.pop(self.chance.randrange(len(self._pins)))
            self.engine.unpin_prefix(token_ids, tenant_id=tenant_id, adapters=parts)

    _MOVES = (
        (_add, 30),
        (_some_steps, 40),
        (_time_passes, 2),
        (_cancel, 6),
        (_prefetch, 5),
        (_replace, 6),
        (_trouble, 4),
        (_pin, 4),
        (_unpin, 3),
    )

    def _register(self, name: str, kind: str, digest: str | None = None) -> None:
        """Each time from a folder that nobody else has, as on a worker's disk."""
        digest = digest or f"{kind}-{self._num_registered}"
        path = self.folder / str(self._num_registered)
        self._num_registered += 1
        path.symlink_to(self.world.adapters[kind])
        try:
            self.engine.register_adapter(digest, path)
        except OutOfPages:
            return
        self._digests[name], self._paths[digest] = digest, path

    def _draw_digest(self) -> str | None:
        return self.chance.choice(list(self._digests.values())) if self._digests else None

    def _draw_blend(self) -> tuple[AdapterPart, ...]:
        count = min(self.chance.choice([0, 1, 1, 1, 2, 3, MAX_PARTS]), len(self._digests))
        return tuple(
            AdapterPart(digest=digest, weight=self.chance.choice([1.0, 0.5, 1.5]))
            for digest in self.chance.sample(list(self._digests.values()), count)
        )

    def _draw_deadline(self) -> float | None:
        if self.chance.random() < 0.6:
            return None
        return self.now + self.chance.choice([0.4, 1.5, 5.0, 30.0])

    # The end

    def _end(self) -> None:
        """Everybody leaves, requests first or pins; nothing is left of them."""
        if self.chance.random() < 0.5:
            self._unpin_all()
        self._step_while(lambda: any(not _has_ended(r) for r in self.results.values()))
        self._unpin_all()
        self._step_while(self.engine.has_work)
        stats = self.engine.stats()
        assert (stats.kv_pages, stats.pinned_pages) == (0, 0)
        assert stats.free_pages == stats.num_pages - stats.adapter_pages
        for digest in self._digests.values():
            self.engine.unregister_adapter(digest)
        self.threads.end()
        self._step()
        self._check_empty()

    def _unpin_all(self) -> None:
        self.engine.keep_prefixes([])
        while self._pins:
            self._unpin()

    def _step_while(self, is_busy: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if not is_busy():
                return
            self._step()
        waiting = [key for key, result in self.results.items() if not _has_ended(result)]
        raise AssertionError(f"{waiting} never end: {self.engine.stats()}")

    def _check_empty(self) -> None:
        engine = self.engine
        stats, host = engine.stats(), engine._store._loader._host
        assert (stats.adapter_pages, stats.num_adapters) == (0, 0)
        assert host.num_free == host.num_pages
        assert not engine._store._adapters and not engine._requests._pending
        assert not engine._sampler._states and not engine._grammars._matchers
        assert not engine._deadlines._entries

    # Judgement

    def judge(self, key: Key) -> str:
        """Why a continuation ended, as a word; AssertionError unless it should, and as it did."""
        request, result = self.requests[key[0]], self.results[key]
        last = result.last
        assert last is not None and last.num_prompt_tokens == len(request.token_ids)
        if last.error is not None:
            assert last.finish_reason is FinishReason.ERROR
            self._judge_error(key, last.error)
        elif last.finish_reason is FinishReason.CANCELLED:
            assert key in self._cancelled
        is_whole = last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_whole or result.token_ids:
            _compare(result, self.world.alone.run(request, key[1]), is_whole)
        return str(last.finish_reason) if last.error is None else type(last.error).__name__

    def _judge_error(self, key: Key, error: Exception) -> None:
        request, last = self.requests[key[0]], self.results[key].last
        assert last is not None
        if isinstance(error, DeadlineExceeded):
            assert request.deadline is not None
        elif isinstance(error, OutOfPages):
            num_tokens = len(request.token_ids) + last.num_generated
            room = self._rooms[key[0]]
            assert not self._has_room(num_tokens, room, self._pinned[key]), "failed though it fits"
        else:
            assert isinstance(error, AdapterError), error
            assert any(part.digest in self.threads.troubled for part in request.adapters), error

    def _has_room(self, num_tokens: int, num_adapter: int, num_pinned: int) -> bool:
        """Whether so many tokens and pages of adapters fit beside pins, when nobody else is there.

        Not what of the pins is the request's own: that is the engine's to know.
        """
        pool = self.engine._pool
        num_kv = self.engine._scheduler.most_held(num_tokens) + num_pinned
        return (
            num_kv <= pool.max_used(PageUse.KV)
            and num_adapter <= pool.max_used(PageUse.ADAPTER)
            and num_kv + num_adapter <= pool.num_pages
        )


def _has_ended(result: Result) -> bool:
    return result.last is not None and result.last.finish_reason is not None


def _compare(result: Result, alone: Result, is_whole: bool) -> None:
    """Raise AssertionError unless `result` is what the request has alone, or the beginning."""
    count = len(result.token_ids)
    assert result.token_ids == alone.token_ids[:count]
    for own, other in zip(result.logprobs, alone.logprobs, strict=False):
        assert own.token_id == other.token_id and abs(own.logprob - other.logprob) < 1e-3
    if is_whole:
        assert count == len(alone.token_ids) and result.finish_reason == alone.finish_reason
        assert len(result.logprobs) == len(alone.logprobs)
        assert result.last is not None and alone.last is not None
        assert result.last.num_generated == alone.last.num_generated
