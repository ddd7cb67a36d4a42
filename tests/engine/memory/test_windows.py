"""Where every layer has a sliding window, pages behind it are given back while a request runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, FinishReason, OutOfPages, Priority
from engine.model.config import ModelConfig
from tests.engine.conftest import SMALL, Result, load_base, prompt, request, save_adapter
from tests.engine.model.families import save_family

WINDOW, PAGE = 17, 16
# What a chunk of a page touches, and what its first token sees.
MOST_PAGES = (WINDOW - 1 + PAGE - 2) // PAGE + 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    return save_family(folder, "mistral", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return save_adapter(base, folder / "a", r=4, target_modules=["q_proj", "v_proj", "up_proj"])


def greedy(base: Path, adapter: Path | None, tokens: list[int], num_tokens: int) -> list[int]:
    return list(_greedy(base, adapter, tuple(tokens), num_tokens))


@functools.cache
def _model(base: Path, adapter: Path | None) -> Any:
    model = load_base(base)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    return model


@functools.cache
def _greedy(
    base: Path, adapter: Path | None, tokens: tuple[int, ...], num_tokens: int
) -> list[int]:
    out = _model(base, adapter).generate(
        input_ids=torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
    )
    return out[0, len(tokens) :].tolist()


def make_engine(base: Path, num_pages: int, **options: object) -> Engine:
    plain = EngineConfig(model_dir=base)
    page_bytes = plain.page_bytes(ModelConfig.from_folder(base))
    given = {**SMALL, "arena_bytes": num_pages * page_bytes, **options}
    return Engine(EngineConfig(model_dir=base, **given))  # type: ignore[arg-type]


def num_pages_of(base: Path, adapter: Path) -> int:
    engine = make_engine(base, 100)
    engine.register_adapter("a", adapter)
    num_pages = engine._store.num_pages("a")
    engine.close()
    return num_pages


def run_poisoned(engine: Engine, *requests: object) -> tuple[dict[str, Result], int]:
    """Step to the end, with what nobody owns made unusable; results, and the most KV pages held."""
    results: dict[str, Result] = {}
    most = 0
    for each in requests:
        engine.add(each)  # type: ignore[arg-type]
    while engine.has_work():
        for output in engine.step():
            name = f"{output.request_id}/{output.index}"
            results.setdefault(name, Result()).add(output)
        engine.check_integrity()
        stats = engine.stats()
        most = max(most, stats.kv_pages)
        free = [p for p in range(stats.num_pages) if not engine._pool.num_references(p)]
        engine._runner.arena[free] = float("nan")
    return results, most


@pytest.mark.parametrize("max_step_tokens", [512, 32])
def test_a_long_request_holds_no_more_than_its_window(
    base: Path, adapter: Path, max_step_tokens: int
) -> None:
    """Tokens are Hugging Face's, with and without an adapter, in one batch."""
    engine = make_engine(base, 60, max_step_tokens=max_step_tokens, prefix_cache=False)
    engine.register_adapter("a", adapter)
    results, most = run_poisoned(
        engine,
        request("base", prompt(1, 40), max_tokens=200),
        request("adapted", prompt(2, 70), adapter="a", max_tokens=200),
        request("short", prompt(3, 3), max_tokens=8),
    )
    assert results["base/0"].token_ids == greedy(base, None, prompt(1, 40), 200)
    assert results["adapted/0"].token_ids == greedy(base, adapter, prompt(2, 70), 200)
    assert results["short/0"].token_ids == greedy(base, None, prompt(3, 3), 8)
    chunk_pages = -(-min(max_step_tokens, 110) // PAGE)
    assert most <= 2 * MOST_PAGES + chunk_pages + 1
    assert engine.stats().kv_pages == 0
    engine.close()


def test_a_request_may_be_longer_than_the_arena(base: Path) -> None:
    engine = make_engine(base, MOST_PAGES + 4, prefix_cache=False)
    results, most = run_poisoned(engine, request("r", prompt(1, 20), max_tokens=400))
    assert results["r/0"].finish_reason == FinishReason.LENGTH
    assert results["r/0"].token_ids == greedy(base, None, prompt(1, 20), 400)
    assert most <= MOST_PAGES and engine.stats().num_preemptions == 0
    engine.close()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prefixes_and_continuations_are_still_shared(base: Path, prefix_cache: bool) -> None:
    """What is given back may be found again, and nobody is handed a page that has gone."""
    engine = make_engine(base, 40, prefix_cache=prefix_cache, max_step_tokens=48)
    wanted = greedy(base, None, prompt(5, 100), 30)
    for name in ("first", "again"):
        results, _ = run_poisoned(engine, request(name, prompt(5, 100), max_tokens=30, n=3))
        for index in range(3):
            assert results[f"{name}/{index}"].token_ids == wanted
    assert (results["again/0"].last.num_cached_tokens > 0) == prefix_cache  # type: ignore[union-attr]
    engine.close()


def test_preemption_begins_anew(base: Path) -> None:
    engine = make_engine(base, 8, prefix_cache=False, max_step_tokens=64)
    requests = [request(str(i), prompt(i, 5 + i), max_tokens=60) for i in range(6)]
    results, _ = run_poisoned(engine, *requests)
    for i in range(6):
        assert results[f"{i}/0"].token_ids == greedy(base, None, prompt(i, 5 + i), 60)
    assert engine.stats().num_preemptions > 0
    engine.close()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_step_tokens", [512, 100, 5])
def test_a_prompt_may_be_longer_than_the_arena(
    base: Path, adapter: Path, prefix_cache: bool, max_step_tokens: int
) -> None:
    """With as few pages as it says that it needs, and its adapter's."""
    num_adapter = num_pages_of(base, adapter)
    options = {"prefix_cache": prefix_cache, "max_step_tokens": max_step_tokens}
    engine = make_engine(base, MOST_PAGES + num_adapter, **options)
    engine.register_adapter("a", adapter)
    for name, seed, digest in (("base", 1, None), ("adapted", 2, "a"), ("again", 1, None)):
        tokens = prompt(seed, 400)
        results, most = run_poisoned(engine, request(name, tokens, adapter=digest, max_tokens=40))
        wanted = greedy(base, adapter if digest else None, tokens, 40)
        assert results[f"{name}/0"].token_ids == wanted
        assert most <= MOST_PAGES + (0 if digest else num_adapter)
    assert engine.stats().num_preemptions == 0
    engine.close()


def test_less_than_a_window_is_refused(base: Path, adapter: Path) -> None:
    engine = make_engine(base, MOST_PAGES - 1)
    with pytest.raises(OutOfPages, match=f"need {MOST_PAGES} pages; there are {MOST_PAGES - 1}"):
        engine.add(request("long", prompt(1, 400)))
    short = prompt(1, PAGE * (MOST_PAGES - 1) - 1)
    results, _ = run_poisoned(engine, request("short", short, max_tokens=1))
    assert results["short/0"].token_ids == greedy(base, None, short, 1)
    engine.close()
    engine = make_engine(base, MOST_PAGES + num_pages_of(base, adapter) - 1)
    engine.register_adapter("a", adapter)
    with pytest.raises(OutOfPages, match="prompt and adapters need"):
        engine.add(request("adapted", prompt(1, 400), adapter="a"))
    engine.close()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_long_prompts_share_a_small_arena(base: Path, prefix_cache: bool) -> None:
    """Several at a time, continuations and a batch request among them."""
    engine = make_engine(base, 2 * MOST_PAGES, prefix_cache=prefix_cache, max_step_tokens=64)
    requests = [
        request("batch", prompt(1, 300), max_tokens=30, priority=Priority.BATCH),
        request("twice", prompt(2, 200), max_tokens=30, n=2),
        request("once", prompt(3, 350), max_tokens=30),
        request("short", prompt(4, 5), max_tokens=60),
    ]
    results, _ = run_poisoned(engine, *requests)
    for each in requests:
        wanted = greedy(base, None, list(each.token_ids), each.sampling.max_tokens or 0)
        for index in range(each.n):
            assert results[f"{each.request_id}/{index}"].token_ids == wanted
    assert engine.stats().kv_pages == 0
    engine.close()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_steps", [3, 30])
def test_a_long_prompt_that_is_preempted_fits_again(
    base: Path, prefix_cache: bool, num_steps: int
) -> None:
    """In the middle of its prompt, and in the middle of its answer."""
    engine = make_engine(base, MOST_PAGES, prefix_cache=prefix_cache, max_running=1)
    engine.add(request("long", prompt(1, 300), max_tokens=40, priority=Priority.BATCH))
    before = [output for _ in range(num_steps) for output in engine.step()]
    assert (num_steps > 3) == any(output.token_ids for output in before)
    results, _ = run_poisoned(engine, request("quick", prompt(2, 200), max_tokens=3))
    assert engine.stats().num_preemptions == 1
    assert results["quick/0"].token_ids == greedy(base, None, prompt(2, 200), 3)
    tokens = [token for output in before for token in output.token_ids]
    assert tokens + results["long/0"].token_ids == greedy(base, None, prompt(1, 300), 40)
    engine.close()


def test_what_is_pinned_leaves_a_long_prompt_its_window(base: Path) -> None:
    system = prompt(1, 4 * PAGE)
    engine = make_engine(base, 4 + MOST_PAGES, pin_share=0.7)
    engine.pin_prefix(system)
    run_poisoned(engine)
    assert engine.stats().pinned_pages == 4
    for name, tokens in (("own", system + prompt(2, 300)), ("other", prompt(3, 300))):
        results, _ = run_poisoned(engine, request(name, tokens, max_tokens=4))
        assert results[f"{name}/0"].token_ids == greedy(base, None, tokens, 4)
        assert engine.stats().pinned_pages == 4
    engine.close()
    engine = make_engine(base, 4 + MOST_PAGES - 1, pin_share=0.7)
    engine.pin_prefix(system)
    run_poisoned(engine)
    with pytest.raises(OutOfPages, match="with the 4 that are pinned"):
        engine.add(request("own", system + prompt(2, 300)))
    engine.close()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_has_outgrown_the_arena_can_be_preempted(base: Path, prefix_cache: bool) -> None:
    engine = make_engine(base, 8, prefix_cache=prefix_cache, max_step_tokens=512, max_running=1)
    engine.add(request("long", prompt(1, 20), max_tokens=250, priority=Priority.BATCH))
    before = [output for _ in range(180) for output in engine.step()]
    results, _ = run_poisoned(engine, request("quick", prompt(2, 9), max_tokens=3))
    assert engine.stats().num_preemptions == 1
    assert results["quick/0"].token_ids == greedy(base, None, prompt(2, 9), 3)
    tokens = [token for output in before for token in output.token_ids]
    assert tokens + results["long/0"].token_ids == greedy(base, None, prompt(1, 20), 250)
    engine.close()


def test_a_layer_that_sees_all_keeps_all(tmp_path: Path) -> None:
    folder = save_family(tmp_path, "qwen2-sliding")
    engine = make_engine(folder, 20, prefix_cache=False)
    _, most = run_poisoned(engine, request("r", prompt(1, 20), max_tokens=100))
    assert most == -(-120 // PAGE)
    engine.close()
