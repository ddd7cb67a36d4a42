"""Draft heads of an adapter change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from contract.adapters.draft_heads import head_names
from engine import AdapterMismatch, Engine, EngineConfig, FinishReason, Request
from engine.drafts.costs import CPU
from engine.drafts.heads import _pays
from engine.drafts.profile import Kind, Profile, Source
from tests.engine.conftest import SMALL, MakeEngine, Result, load_base, prompt, request, run
from tests.engine.drafts.headed import HIDDEN, NUM_HEADS, RANK, random_heads, with_heads

DEVICE = pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"


class Planted:
    """In place of an engine's heads: they guess what they are told, some of it wrong."""

    def __init__(self, engine: Engine, answers: dict[str, Result], every: int) -> None:
        self._engine, self._answers, self._every, self._count = engine, answers, every, 0

    def guess(self, asked: Any) -> list[list[int]]:
        """Find whose state each is by identity; head i guesses token i + 1 of what is left."""
        owners = {
            id(s.drafting.heads.x): s
            for s in self._engine._scheduler.running
            if s.drafting is not None
        }
        guesses = []
        for x, heads in asked:
            sequence = owners[id(x)]
            name = sequence.request.request_id + (f"/{sequence.index}" if sequence.index else "")
            known = self._answers[name].token_ids[sequence.num_generated :][: len(heads)]
            self._count += 1
            if known and self._count % self._every == 0:
                known[self._count % len(known)] ^= 1
            guesses.append([*known, *[0] * (len(heads) - len(known))])
        return guesses


def both(make: Callable[..., Engine], *requests: Request, **config: Any) -> Engine:
    """See that drafts of heads change nothing, random ones and those of which most are right."""
    plain = run(make(**config), *requests)
    engine = make(speculation=True, **config)
    same(run(engine, *requests, check=True), plain)
    assert engine.stats().drafts["heads"].drafted > 0
    engine = make(speculation=True, **config)
    engine._speculation._heads._guesses = Planted(engine, plain, every=3)
    same(run(engine, *requests, check=True), plain)
    assert engine.stats().drafts["heads"].accepted > 0
    return engine


def same(found: dict[str, Result], expected: dict[str, Result]) -> None:
    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert own.token_ids == expected[name].token_ids, name
        assert own.finish_reason == expected[name].finish_reason
        assert type(own.error) is type(expected[name].error)


ADAPTERS = ("all-4+heads", "qv-16+heads", "dora+heads", "ends+heads", "all-4", None)


def test_adapters_with_heads_and_without_in_one_batch(make_headed: MakeEngine) -> None:
    requests = [
        request(
            str(i),
            prompt(i, 10 + i),
            adapter=ADAPTERS[i % len(ADAPTERS)],
            max_tokens=40,
            speculation=i % 5 != 4,
            n=1 + (i % 4 == 0),
            logprobs=1 if i % 3 == 0 else None,
            temperature=0.7 if i % 4 == 3 else 0.0,
            seed=3,
        )
        for i in range(12)
    ]
    engine = both(make_headed, *requests, max_running=6)
    assert engine.stats().uses_draft_heads


def test_preempted_requests(make_headed: MakeEngine) -> None:
    requests = [
        request(str(i), prompt(i, 60), adapter="all-4+heads", max_tokens=60) for i in range(6)
    ]
    room = (8 << 20) - 32 * 8192  # so that 32 pages are left to KV
    config: dict[str, Any] = {"min_adapter_bytes": room, "max_running": 6, "prefix_cache": False}
    engine = both(make_headed, *requests, **config)
    assert engine.stats().num_preemptions > 0


def test_schemas_walk_the_guesses_through_their_grammar(make_headed: MakeEngine) -> None:
    pytest.importorskip("outlines")
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 5})

    def make(**config: Any) -> Engine:
        engine = make_headed(**config)
        engine.prepare_grammars().result(300)
        return engine

    requests = [
        request(
            str(i), prompt(i, 12), adapter=ADAPTERS[i], json_schema=schema, max_tokens=30,
            ignore_eos=False,
        )
        for i in range(3)
    ]  # fmt: skip
    both(make, *requests)


def test_limits_stop_tokens_and_cancellation(make_headed: MakeEngine) -> None:
    own = {"adapter": "all-4+heads"}
    plain = run(make_headed(), request("a", prompt(1, 20), max_tokens=20, **own))["a"].token_ids
    engine = make_headed(speculation=True)
    planted = {"a": Result()}
    planted["a"].token_ids = plain
    engine._speculation._heads._guesses = Planted(engine, planted, every=1000)
    for last in range(1, 9):
        result = run(engine, request("a", prompt(1, 20), max_tokens=last, **own))["a"]
        assert (result.token_ids, result.finish_reason) == (plain[:last], FinishReason.LENGTH)
    stop = next(token for i, token in enumerate(plain) if i > 3 and token not in plain[:i])
    result = run(engine, request("a", prompt(1, 20), max_tokens=20, stop_token_ids=(stop,), **own))[
        "a"
    ]
    assert result.token_ids[:4] == plain[:4] and result.finish_reason == FinishReason.STOP
    engine.add(request("a", prompt(1, 20), max_tokens=20, **own))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    assert run(engine, check=True)["a"].finish_reason == FinishReason.CANCELLED


def test_heads_compute_what_is_documented(
    tiny_model: Path, make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Each guess is argmax lm_head(x + silu(up @ (down @ x))), x being what the head reads."""
    tensors = random_heads(7)
    engine = make_engine(speculation=True, arena_bytes=8 << 20)
    engine.register_adapter("own", with_heads(adapters["all-4"], tmp_path / "own", tensors))
    engine.add(request("a", prompt(0, 9), adapter="own", max_tokens=8))
    while not engine._scheduler.running or not engine._scheduler.running[0].num_generated:
        engine.step()
    [sequence] = engine._scheduler.running
    x = sequence.drafting.heads.x
    head = load_base(tiny_model).get_output_embeddings().requires_grad_(False)
    assert int(head(x).argmax()) == sequence.token_ids[-1], "chosen from that state"
    expected = []
    for down, up in map(head_names, range(NUM_HEADS)):
        inner = x + functional.silu(tensors[up] @ (tensors[down] @ x))
        expected.append(int(head(inner).argmax()))
    engine.step()
    assert sequence.drafting.heads.guesses == expected


@pytest.mark.parametrize("device", [DEVICE])
def test_heads_draft_on_the_gpu_runner(
    make_headed: MakeEngine, tiny_model: Path, device: str
) -> None:
    """They read what the graph's last matrix read; one request uses an adapter without heads."""
    requests = [
        request("a", prompt(1, 9), adapter="all-4+heads", max_tokens=12),
        request("b", prompt(2, 5), adapter="qv-16", max_tokens=9),
    ]
    plain = run(make_headed(), *requests)
    config = {"device": device, "dtype": "float32", "use_triton": True, "max_running": 3}
    engine = make_headed(speculation=True, **config)
    heads: Any = engine._speculation._heads
    real, told = heads._guesses, Planted(engine, plain, every=3)
    base_head = load_base(tiny_model).get_output_embeddings().requires_grad_(False)
    tensors, count = random_heads(0), 0

    class Both:
        """Sees that the real guesses are right; tells others."""

        def guess(self, asked: Any) -> list[list[int]]:
            nonlocal count
            for (x, _), guesses in zip(asked, real.guess(asked), strict=True):
                x, count = x.cpu(), count + 1
                for (down, up), guess in zip(map(head_names, range(3)), guesses, strict=False):
                    inner = x + functional.silu(tensors[up] @ (tensors[down] @ x))
                    assert guess == int(base_head(inner).argmax())
            found: list[list[int]] = told.guess(asked)
            return found

    heads._guesses = Both()
    same(run(engine, *requests, check=True), plain)
    assert count > 1
    assert engine.stats().drafts["heads"].accepted > 1


def test_blends_and_other_weights_use_no_heads(make_headed: MakeEngine) -> None:
    engine = make_headed(speculation=True)
    for blend in ({"all-4+heads": 0.5}, {"all-4+heads": 1.0, "qv-16+heads": 1.0}):
        run(engine, request("a", prompt(0, 20), adapter=blend, max_tokens=20))
    assert engine.stats().drafts["heads"].drafted == 0


def test_heads_that_guess_wrong_are_asked_seldom(make_headed: MakeEngine) -> None:
    engine = make_headed(speculation=True, max_context=512)
    run(engine, request("a", prompt(0, 20), adapter="all-4+heads", max_tokens=400))
    counts = engine.stats().drafts["heads"]
    assert 0 < counts.drafted < 40


def test_asking_pays_only_where_there_is_room() -> None:
    profile = Profile()
    assert _pays(profile, 3, 1, lambda count: 0.09, CPU.asking)
    assert not _pays(profile, 3, 16, lambda count: 0.6, CPU.asking)
    for _ in range(30):
        profile.note(Kind(Source.HEADS, 0), is_right=False)
    assert not _pays(profile, 3, 1, lambda count: 0.09, CPU.asking)


def test_heads_take_pages_only_where_they_are_used(
    make_headed: MakeEngine, make_engine: MakeEngine
) -> None:
    def pages(**config: Any) -> tuple[int, int]:
        engine = make_headed(**config)
        store = engine._store
        return store.num_pages("all-4+heads"), store.num_pages("all-4")

    with_own, without = pages(speculation=True)
    assert with_own > without
    ignored, without = pages()
    assert ignored == without
    assert not make_engine().stats().uses_draft_heads


def test_bad_heads_are_refused_by_name(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = Engine(EngineConfig(model_dir=tiny_model, speculation=True, **SMALL))
    good = random_heads(0)
    down, up = head_names(1)
    cases: list[tuple[str, dict[str, torch.Tensor], str]] = [
        ("shape", {**good, up: torch.zeros(HIDDEN, RANK + 1)}, up),
        ("lone", {name: good[name] for name in good if name != down}, down),
        ("gap", {name: good[name] for name in good if name not in (down, up)}, down),
        ("five", random_heads(0, 5), head_names(4)[0]),
        ("wide", {**good, down: torch.zeros(HIDDEN + 1, HIDDEN)}, down),
        ("name", {**good, "draft_heads.0.bias": torch.zeros(3)}, "draft_heads.0.bias"),
        ("medusa", {"medusa_head.0.0.linear.weight": torch.zeros(3)}, "Medusa"),
        ("v2", {"0.0.linear.weight": torch.zeros(3)}, "Medusa"),
    ]
    for name, heads, named in cases:
        with pytest.raises(AdapterMismatch, match=named.replace(".", r"\.")):
            engine.register_adapter(name, with_heads(adapters["all-4"], tmp_path / name, heads))
    heads = {**good, down: torch.full((RANK, HIDDEN), torch.nan)}
    engine.register_adapter("nan", with_heads(adapters["all-4"], tmp_path / "nan", heads))
    result = run(engine, request("a", prompt(0, 9), adapter="nan"))["a"]
    assert isinstance(result.error, AdapterMismatch) and down in str(result.error)
    engine.close()
