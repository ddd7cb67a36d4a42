"""What goes wrong for one request inside a step ends that request, and nobody notices else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine import AdapterOverflow, Engine, EngineError, FinishReason
from engine.sampling.grammar import Matcher
from engine.sampling.sampler import Sampler
from tests.engine.conftest import MakeEngine, Oracle, prompt, request, run
from tests.engine.execution.ahead_runner import AheadRunner


def scale_tensors(source: Path, target: Path, factor: float) -> Path:
    """A copy of an adapter whose values are `factor` times as large."""
    shutil.copytree(source, target)
    file = target / "adapter_model.safetensors"
    save_file({name: value * factor for name, value in load_file(file).items()}, file)
    return target


@pytest.mark.parametrize("is_ahead", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "seed": 1},
        {"logprobs": 2},
        {"json_schema": '{"type": "object"}'},
        {"n": 2},
    ],
    ids=["greedy", "drawn", "logprobs", "schema", "two"],
)
def test_an_adapter_whose_numbers_overflow_is_named(
    make_engine: MakeEngine,
    adapters: dict[str, Path],
    oracle: Oracle,
    tmp_path: Path,
    options: dict[str, Any],
    is_ahead: bool,
) -> None:
    """Every value is finite; what the model makes of them is not."""
    engine = make_engine()
    if is_ahead:
        AheadRunner(engine)
    engine.register_adapter("loud", scale_tensors(adapters["all-4"], tmp_path / "loud", 1e18))
    for adapter in ("loud", {"qv-16": 1.0, "loud": 0.5}):
        got = run(
            engine,
            request("before", prompt(1, 20), adapter="all-4", max_tokens=8),
            request("hurt", prompt(2, 20), adapter=adapter, max_tokens=8, **options),
            request("after", prompt(3, 20), adapter="qv-16", max_tokens=8),
            check=True,
        )
        for name in ("hurt", "hurt/1") if "n" in options else ("hurt",):
            assert got[name].finish_reason == FinishReason.ERROR
            assert isinstance(got[name].error, AdapterOverflow)
            assert got[name].error.code == "adapter_incompatible"
            assert "loud" in got[name].error.message
            assert got[name].token_ids == []
            assert got[name].last is not None and got[name].last.num_generated == 0
        assert got["before"].token_ids == oracle.generate(prompt(1, 20), 8, "all-4")
        assert got["after"].token_ids == oracle.generate(prompt(3, 20), 8, "qv-16")
    assert engine.stats().step < 40


Break = Callable[[pytest.MonkeyPatch, Engine], None]


def break_for_one(target: type, name: str, is_meant: Callable[..., bool]) -> Break:
    """Let a method raise what nobody foresaw when its arguments are meant."""

    def apply(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        real = getattr(target, name)

        def broken(*args: Any) -> Any:
            if is_meant(*args):
                raise ZeroDivisionError("a defect")
            return real(*args)

        monkeypatch.setattr(target, name, broken)

    return apply


def is_hurt(sequence: Any) -> bool:
    return bool(sequence.request.request_id == "hurt" and sequence.num_generated == 2)


# The place in a step, and a request that comes by there.
DEFECTS = {
    "penalty": (
        break_for_one(Sampler, "adjust", lambda _, logits, i, sequence: is_hurt(sequence)),
        {"frequency_penalty": 0.5},
    ),
    "draw": (
        break_for_one(Sampler, "choose", lambda _, logits, rows, raw: any(map(is_hurt, rows))),
        {"temperature": 0.7, "seed": 3, "logprobs": 1},
    ),
    "grammar-mask": (
        break_for_one(Matcher, "fill_mask", lambda self, row: True),
        {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 9}'},
    ),
    "grammar-token": (
        break_for_one(Matcher, "accept", lambda self, token_id: True),
        {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 9}'},
    ),
}


@pytest.mark.parametrize("place", DEFECTS)
def test_a_defect_met_by_one_request_ends_that_request(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine = make_engine()
    break_it, options = DEFECTS[place]
    break_it(monkeypatch, engine)
    got = run(
        engine,
        request("keep", prompt(1, 20), adapter="all-4", max_tokens=8, logprobs=1),
        request("hurt", prompt(2, 20), adapter="qv-16", max_tokens=8, **options),
        request("drawn", prompt(3, 9), max_tokens=8, temperature=0.9, seed=5, presence_penalty=0.3),
        check=True,
    )
    assert got["hurt"].finish_reason == FinishReason.ERROR
    assert type(got["hurt"].error) is EngineError
    assert got["hurt"].error.message == "internal error: ZeroDivisionError"
    assert got["keep"].token_ids == oracle.generate(prompt(1, 20), 8, "all-4")
    monkeypatch.undo()
    alone = run(
        make_engine(),
        request("drawn", prompt(3, 9), max_tokens=8, temperature=0.9, seed=5, presence_penalty=0.3),
    )
    assert got["drawn"].token_ids == alone["drawn"].token_ids


def test_a_request_that_cannot_be_set_up_leaves_nothing_behind(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out for the last of its three continuations."""
    engine = make_engine()
    set_up: list[Any] = []
    add = engine._sampler.add

    def fails_at_the_third(sequence: Any) -> None:
        add(sequence)
        set_up.append(sequence)
        if len(set_up) == 3:
            raise MemoryError

    monkeypatch.setattr(engine._sampler, "add", fails_at_the_third)
    asked = request("r", prompt(1, 20), adapter="all-4", max_tokens=8, n=3, regex="[ab]+")
    with pytest.raises(MemoryError):
        engine.add(asked)
    assert not engine.has_work()
    engine.check_integrity()
    engine.unregister_adapter("all-4")
    assert engine.adapter_status("all-4") is None
    got = run(engine, request("r", prompt(1, 20), max_tokens=8), check=True)
    assert got["r"].token_ids == oracle.generate(prompt(1, 20), 8)


def test_a_defect_of_nobody_stays_fatal(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no request can be blamed for must not be taken for a request's fault."""
    engine = make_engine()
    monkeypatch.setattr(engine._builder, "build", lambda step: 1 // 0)
    engine.add(request("r", prompt(1, 20), max_tokens=8))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.cancel("r")
