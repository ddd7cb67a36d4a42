"""The states of gated delta nets in the arena: kept, found, evicted, and never another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from engine.errors import UnsupportedModel
from engine.model.config import ModelConfig
from tests.engine.conftest import SMALL, prompt, request, run
from tests.engine.model.families import save_family

PAGE = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("hybrid"), "qwen3_5")


class Scene:
    """Engines over the base, each answer compared with that of one without a prefix cache."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._plain = self.engine(prefix_cache=False)

    def engine(self, num_pages: int = 64, **config: Any) -> Engine:
        config = {"model_dir": self._base, **SMALL, **config}
        page_bytes = EngineConfig(**config).page_bytes(ModelConfig.from_folder(self._base))
        return Engine(EngineConfig(**{**config, "arena_bytes": num_pages * page_bytes}))

    def ask(
        self, engine: Engine, prompts: list[list[int]], num_tokens: int = 8, **fields: Any
    ) -> list[int]:
        """Ask for all of them at once; the cached tokens of each."""
        asked = [
            request(str(i), each, max_tokens=num_tokens, **fields) for i, each in enumerate(prompts)
        ]
        got, wanted = run(engine, *asked, check=True), run(self._plain, *asked)
        assert {name: each.token_ids for name, each in got.items()} == {
            name: each.token_ids for name, each in wanted.items()
        }
        lasts = [got[str(i)].last for i in range(len(prompts))]
        return [last.num_cached_tokens for last in lasts if last is not None]


@pytest.fixture(scope="module")
def scene(base: Path) -> Iterator[Scene]:
    scene = Scene(base)
    yield scene
    run(scene._plain)


def test_a_state_is_kept_where_prompts_part(scene: Scene) -> None:
    engine, common = scene.engine(), prompt(1, 5 * PAGE)
    own = [prompt(10 + i, 40) for i in range(4)]
    assert scene.ask(engine, [common + own[0]]) == [0]
    assert scene.ask(engine, [common + own[1]]) == [0]  # which keeps a state at the common pages
    assert scene.ask(engine, [common + own[2], common + own[3]]) == [5 * PAGE] * 2
    assert scene.ask(engine, [common + own[0] + own[1][:20]]) == [7 * PAGE]


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_a_repeated_prompt_finds_all_pages_but_the_last_tokens(scene: Scene, length: int) -> None:
    engine = scene.engine()
    assert scene.ask(engine, [prompt(2, length)]) == [0]
    assert scene.ask(engine, [prompt(2, length)]) == [(length - 1) // PAGE * PAGE]


@pytest.mark.parametrize("is_cached", [True, False])
def test_continuations_share_their_prompt(scene: Scene, is_cached: bool) -> None:
    engine = scene.engine(prefix_cache=is_cached)
    scene.ask(engine, [prompt(3, 45)], n=3)


def test_prompt_log_probabilities_are_computed_from_a_state(scene: Scene) -> None:
    engine, tokens = scene.engine(), prompt(4, 50)
    scene.ask(engine, [tokens])
    scored = run(engine, request("r", tokens, max_tokens=1, prompt_logprobs=1), check=True)["r"]
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 49


def test_a_pinned_prefix_keeps_its_state(scene: Scene) -> None:
    engine, tokens = scene.engine(num_pages=40), prompt(5, 3 * PAGE)
    engine.pin_prefix(tokens)
    run(engine)
    num_states = EngineConfig(model_dir=scene._base).state_pages(engine.model)
    assert engine.stats().pinned_pages >= 3 + num_states
    for i in range(3):  # evicts what is not pinned
        scene.ask(engine, [prompt(20 + i, 100 + i)])
    assert scene.ask(engine, [tokens + prompt(6, 9)]) == [3 * PAGE]
    engine.unpin_prefix(tokens)
    run(engine)
    engine.check_integrity()
    assert engine.stats().kv_pages == 0


def test_small_arenas_give_the_same_answers(scene: Scene) -> None:
    generator = torch.Generator().manual_seed(7)
    engine, commons = (
        scene.engine(num_pages=26, max_step_tokens=37),
        [prompt(30, 32), prompt(31, 50)],
    )
    for round_ in range(3):
        lengths = torch.randint(1, 50, (5,), generator=generator).tolist()
        prompts = [
            commons[i % 2] + prompt(100 * round_ + i, length) for i, length in enumerate(lengths)
        ]
        scene.ask(engine, prompts, num_tokens=20)
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.kv_pages == 0


def test_room_for_the_states_is_counted(base: Path, scene: Scene) -> None:
    model = ModelConfig.from_folder(base)
    config = EngineConfig(model_dir=base)
    num_states = config.state_pages(model)
    assert num_states * config.page_bytes(model) >= 4 * 2 * (2 * 192 + 8 * 8 * 20)
    assert config.position_limit(model, 2 * num_states + 1) == (2 * num_states + 1) * PAGE
    with pytest.raises(ValueError, match="arena"):
        config.position_limit(model, 2 * num_states)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculation", True),
        ("base_precision", "fp8"),
        ("kv_precision", "fp8"),
    ],
)
def test_what_is_not_done_is_refused_by_name(base: Path, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        Engine(EngineConfig(**{"model_dir": base, **SMALL, field: value}))
    assert raised.value.param == field
