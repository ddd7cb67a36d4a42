"""Random games: see `tests.engine.games`.

To play chosen ones: `GAMES=20192,1000-1100 python -m pytest -m long tests/engine/test_games.py`.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.engine.game_world import LONG, SHORT, World, save_world
from tests.engine.games import Score, play

#: Games that found something, and what. Each kind of model is played, both in turn and ahead.
FOUND = {
    102: "an adapter that came back was read where it had been",
    114: "a request waited for ever for room that a pinned prefix had",
    202: "a request waited for ever for a disk that did not answer",
    232: "memory outside of the host's slab was counted as room in it",
    1023089590: "room was made for an adapter but for its tail, whose shared page went meanwhile",
    3578828988: "who ran while a blend's last part was copied took the others' pages, for ever",
}
#: What found the same in another model.
FOUND_AGAIN = (106, 135, 219)
NUM_GAMES = 400
LIMIT_S = 900


@pytest.fixture(scope="module")
def worlds(
    tiny_model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[World]]:
    folder = tmp_path_factory.mktemp("worlds")
    made = [
        World("llama", tiny_model, adapters),
        save_world(folder / "mistral", "mistral", lengths=(*SHORT, *LONG)),
        save_world(folder / "qwen3", "qwen3"),
    ]
    yield made
    for world in made:
        world.alone.close()


def play_all(
    seeds: Iterable[int],
    worlds: list[World],
    folder: Path,
    limit_s: float = 1e9,
    *,
    pins_adapters: bool = False,
) -> list[Score]:
    """The scores of as many games as the time is enough for."""
    begun = time.monotonic()
    scores = []
    for seed in seeds:
        if time.monotonic() - begun > limit_s:
            break
        disk = folder / str(seed)
        disk.mkdir()
        scores.append(play(seed, worlds, disk, pins_adapters=pins_adapters))
    return scores


def test_known_games(worlds: list[World], tmp_path: Path) -> None:
    scores = play_all(FOUND, worlds, tmp_path)
    ends = sum((score.ends for score in scores), Counter[str]())
    assert ends.keys() >= {
        "length", "stop", "cancelled",
        "AdapterUnavailable", "DeadlineExceeded", "DeadlineUnreachable", "OutOfPages",
    }  # fmt: skip


@pytest.mark.long
def test_known_games_of_other_models(worlds: list[World], tmp_path: Path) -> None:
    play_all(FOUND_AGAIN, worlds, tmp_path)


def test_games_in_which_adapters_are_pinned(worlds: list[World], tmp_path: Path) -> None:
    play_all(range(2), worlds, tmp_path, pins_adapters=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[World]]:
    made = save_world(tmp_path_factory.mktemp("hybrid"), "qwen3_5", more_pages=6)
    yield [made]
    made.alone.close()


def test_games_with_states(hybrid: list[World], tmp_path: Path) -> None:
    play_all((0, 105), hybrid, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
def test_many_games_with_states(hybrid: list[World], tmp_path: Path) -> None:
    first = random.SystemRandom().randrange(1 << 32)
    play_all(list(chosen_seeds()) or range(first, first + NUM_GAMES), hybrid, tmp_path, LIMIT_S / 2)


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("pins_adapters", [False, True])
def test_many_games(worlds: list[World], tmp_path: Path, pins_adapters: bool) -> None:
    first = random.SystemRandom().randrange(1 << 32)
    seeds = list(chosen_seeds()) or range(first, first + NUM_GAMES)
    play_all(seeds, worlds, tmp_path, LIMIT_S / 2, pins_adapters=pins_adapters)


def chosen_seeds() -> Iterator[int]:
    for part in filter(None, os.environ.get("GAMES", "").split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
