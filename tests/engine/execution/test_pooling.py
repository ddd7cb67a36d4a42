"""Vectors of prompts are those of transformers and PEFT, whatever else the engine is doing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    AdapterMismatch,
    AdapterOverflow,
    DeadlineExceeded,
    Engine,
    EngineConfig,
    FinishReason,
    Priority,
    Request,
    RequestError,
    UnsupportedModel,
)
from engine.request import Pooling, VectorParams
from tests.engine.classifiers import probabilities, save_classifier
from tests.engine.conftest import (
    MakeEngine,
    Oracle,
    Result,
    prompt,
    request,
    run,
    save_model,
)
from tests.engine.execution.ahead_runner import AheadRunner
from tests.engine.execution.test_gpu_engine import make_gpu_engine
from tests.engine.test_failures import scale_tensors

CHOSEN = [None, "all-4", "qv-16", "dora", "bias", "ends"]
PAGE_BYTES = 2048 * 4


def wanted(name: str, tokens: list[int], adapter: Any = None, **fields: Any) -> Request:
    own: Any = {"max_tokens": 0, "speculation": False}
    for field in ("priority", "tenant_id"):
        if field in fields:
            own[field] = fields.pop(field)
    return request(name, tokens, adapter=adapter, vector=VectorParams(**fields), **own)


class Vectors:
    """Vectors by transformers and PEFT."""

    def __init__(self, oracle: Oracle) -> None:
        self._model = oracle._model

    def of(self, tokens: list[int], adapter: str | None, pooling: Pooling) -> list[float]:
        norm = self._model.get_base_model().model.norm
        seen: list[torch.Tensor] = []
        hook = norm.register_forward_hook(lambda module, args, out: seen.append(out))
        if adapter is not None:
            self._model.set_adapter(adapter)
        with torch.inference_mode():
            if adapter is None:
                with self._model.disable_adapter():
                    self._model(torch.tensor([tokens]))
            else:
                self._model(torch.tensor([tokens]))
        hook.remove()
        states = seen[0][0].double()
        pooled = {Pooling.MEAN: states.mean(0), Pooling.LAST: states[-1], Pooling.CLS: states[0]}
        found: list[float] = (pooled[pooling] / pooled[pooling].norm()).tolist()
        return found


@pytest.fixture(scope="module")
def vectors(oracle: Oracle) -> Vectors:
    return Vectors(oracle)


def check(result: Result, expected: list[float]) -> None:
    assert result.error is None, result.error
    assert result.last is not None and result.last.vector is not None
    assert result.last.vector == pytest.approx(expected, abs=1e-5)
    assert (result.finish_reason, result.token_ids) == (FinishReason.STOP, [])
    assert result.last.num_generated == 0


@pytest.mark.parametrize("max_step_tokens", [512, 24], ids=["whole", "chunked"])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_every_pooling_beside_generation(
    make_engine: MakeEngine,
    oracle: Oracle,
    vectors: Vectors,
    pooling: Pooling,
    max_step_tokens: int,
) -> None:
    engine = make_engine(max_step_tokens=max_step_tokens)
    asked, prompts = [], {}
    for i, adapter in enumerate(CHOSEN):
        prompts[str(adapter)] = prompt(i, 1 + 13 * i)
        asked.append(wanted(str(adapter), prompts[str(adapter)], adapter, pooling=pooling))
        asked.append(request(f"{adapter} text", prompt(i, 9), adapter=adapter, max_tokens=5))
    results = run(engine, *asked, check=True)
    for i, adapter in enumerate(CHOSEN):
        expected = vectors.of(prompts[str(adapter)], adapter, pooling)
        check(results[str(adapter)], expected)
        told = results[f"{adapter} text"]
        assert told.token_ids == oracle.generate(prompt(i, 9), 5, adapter)


def test_fewer_dimensions_are_of_length_one_again(
    make_engine: MakeEngine, vectors: Vectors
) -> None:
    engine = make_engine()
    tokens = prompt(1, 20)
    got = run(engine, wanted("r", tokens, pooling=Pooling.MEAN, dimensions=5))["r"]
    first = torch.tensor(vectors.of(tokens, None, Pooling.MEAN)[:5])
    check(got, (first / first.norm()).tolist())
    with pytest.raises(RequestError, match="dimensions must be") as raised:
        engine.add(wanted("r", tokens, dimensions=65))
    assert raised.value.param == "dimensions"


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_the_prefix_cache_serves_what_needs_no_states(
    make_engine: MakeEngine, vectors: Vectors, pooling: Pooling
) -> None:
    engine = make_engine()
    tokens = prompt(1, 70)
    run(engine, request("before", tokens, adapter="all-4", max_tokens=3))
    got = run(engine, wanted("r", tokens, "all-4", pooling=pooling), check=True)["r"]
    check(got, vectors.of(tokens, "all-4", pooling))
    assert got.last is not None
    assert got.last.num_cached_tokens == (64 if pooling is Pooling.LAST else 0)
    other = run(engine, wanted("r", tokens, "all-4", pooling=pooling, tenant_id="other"))["r"]
    assert other.last is not None and other.last.num_cached_tokens == 0


def test_who_is_preempted_begins_again(make_engine: MakeEngine, vectors: Vectors) -> None:
    """An interactive request takes the only seat in the middle of the prompt, again and again."""
    engine = make_engine(max_running=1, max_step_tokens=20)
    tokens = prompt(2, 130)
    result = Result()
    engine.add(wanted("r", tokens, pooling=Pooling.MEAN, priority=Priority.BATCH))
    for number in range(4):
        for _ in range(4):
            for output in engine.step():
                if output.request_id == "r":
                    result.add(output)
        engine.add(request(f"other {number}", prompt(number, 5), max_tokens=2))
    while engine.has_work():
        for output in engine.step():
            if output.request_id == "r":
                result.add(output)
        engine.check_integrity()
    assert engine.stats().num_preemptions >= 2
    check(result, vectors.of(tokens, None, Pooling.MEAN))


def test_pages_run_short(make_engine: MakeEngine, oracle: Oracle, vectors: Vectors) -> None:
    engine = make_engine(arena_bytes=70 * PAGE_BYTES, max_step_tokens=64)
    texts = [request(f"text {i}", prompt(i, 90), max_tokens=24) for i in range(10)]
    prompts = [prompt(i, 150 + i) for i in range(8)]
    asked = [wanted(str(i), p, pooling=Pooling.MEAN) for i, p in enumerate(prompts)]
    results = run(engine, *texts, *asked, check=True)
    assert engine.stats().num_preemptions > 0
    for i, tokens in enumerate(prompts):
        check(results[str(i)], vectors.of(tokens, None, Pooling.MEAN))
    for i in range(10):
        assert results[f"text {i}"].token_ids == oracle.generate(prompt(i, 90), 24)


def test_steps_launched_ahead(make_engine: MakeEngine, oracle: Oracle, vectors: Vectors) -> None:
    """On a GPU a chunk is launched before the sum of the one before it has been read."""
    engine = make_engine(max_step_tokens=24)
    run(engine, request("warm", prompt(5, 3), adapter="all-4", max_tokens=1))
    AheadRunner(engine)
    engine.add(request("plain", prompt(6, 10), adapter="all-4", max_tokens=30))
    plain, others = Result(), {}
    for step in range(200):
        if step in (3, 4, 9):
            others[str(step)] = prompt(step, 70)
            engine.add(wanted(str(step), others[str(step)], "all-4", pooling=Pooling.MEAN))
        for output in engine.step():
            if output.request_id == "plain":
                plain.add(output)
            else:
                result = Result()
                result.add(output)
                check(result, vectors.of(others.pop(output.request_id), "all-4", Pooling.MEAN))
        engine.check_integrity()
    assert not others
    assert plain.token_ids == oracle.generate(prompt(6, 10), 30, "all-4")


def test_cancelled_and_late(make_engine: MakeEngine) -> None:
    now = [0.0]
    engine = make_engine(clock=lambda: now[0], max_step_tokens=16)
    engine.add(replace(wanted("late", prompt(1, 60)), deadline=5.0))
    engine.add(wanted("left", prompt(2, 60)))
    engine.step()
    engine.cancel("left")
    now[0] = 6.0
    ended = {output.request_id: output for _ in range(3) for output in engine.step()}
    assert isinstance(ended["late"].error, DeadlineExceeded)
    assert ended["left"].finish_reason == FinishReason.CANCELLED
    assert ended["late"].vector is None and ended["left"].vector is None


def test_numbers_that_overflow(
    make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine(max_step_tokens=16)
    engine.register_adapter("loud", scale_tensors(adapters["all-4"], tmp_path / "loud", 1e18))
    got = run(engine, wanted("r", prompt(7, 40), "loud", pooling=Pooling.MEAN), check=True)["r"]
    assert isinstance(got.error, AdapterOverflow)
    assert got.last is not None and got.last.vector is None


# How a model and an adapter say it


def test_the_model_says_how(tmp_path: Path, vectors: Vectors, tiny_model: Path) -> None:
    base = save_model(tmp_path / "base")
    (base / "1_Pooling").mkdir()
    file = base / "1_Pooling" / "config.json"
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    file.write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=1 << 20))
    tokens = prompt(1, 20)
    check(run(engine, wanted("r", tokens))["r"], vectors.of(tokens, None, Pooling.MEAN))
    engine.close()
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedModel, match="pooling_mode_max_tokens"):
        Engine(EngineConfig(model_dir=base, arena_bytes=1 << 20))


def edited(adapter: Path, folder: Path, **fields: Any) -> Path:
    """A copy with changed fields of its config."""
    folder.mkdir()
    for file in adapter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text()) | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_says_how(
    make_engine: MakeEngine, adapters: dict[str, Path], vectors: Vectors, tmp_path: Path
) -> None:
    engine = make_engine()
    fields = {"task_type": "FEATURE_EXTRACTION", "pooling": "mean"}
    engine.register_adapter("own", edited(adapters["all-4"], tmp_path / "own", **fields))
    tokens = prompt(1, 20)
    results = run(engine, wanted("own", tokens, "own"), wanted("none", tokens, "all-4"))
    check(results["own"], vectors.of(tokens, "all-4", Pooling.MEAN))
    check(results["none"], vectors.of(tokens, "all-4", Pooling.LAST))
    with pytest.raises(AdapterMismatch, match="pooling: it is max, not one of mean, last, cls"):
        engine.register_adapter("max", edited(adapters["all-4"], tmp_path / "max", pooling="max"))


# Classifiers


@pytest.fixture(scope="module")
def classifiers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Number of labels -> folder. 50 rows of the head are more than a page of 2048 elements."""
    folder = tmp_path_factory.mktemp("classifiers")
    return {n: save_classifier(tiny_model, folder / str(n), n, n) for n in (1, 3, 50)}


@pytest.mark.parametrize("max_step_tokens", [512, 24], ids=["whole", "chunked"])
def test_probabilities_are_transformers(
    make_engine: MakeEngine,
    classifiers: dict[int, Path],
    tiny_model: Path,
    oracle: Oracle,
    max_step_tokens: int,
) -> None:
    engine = make_engine(max_step_tokens=max_step_tokens)
    asked = [request("text", prompt(9, 30), adapter="all-4", max_tokens=4)]
    for number, folder in classifiers.items():
        engine.register_adapter(f"of {number}", folder)
        for i in range(2):
            tokens = prompt(number + i, 17 + 20 * i)
            asked.append(wanted(f"{number}/{i}", tokens, f"of {number}", classifies=True))
    results = run(engine, *asked, check=True)
    for number, folder in classifiers.items():
        for i in range(2):
            tokens = prompt(number + i, 17 + 20 * i)
            expected = probabilities(tiny_model, folder, tokens, number)
            last = results[f"{number}/{i}"].last
            assert last is not None and last.vector is not None, last
            assert last.vector == pytest.approx(expected, abs=1e-4)
    assert results["text"].token_ids == oracle.generate(prompt(9, 30), 4, "all-4")


def test_who_may_ask_for_what(make_engine: MakeEngine, classifiers: dict[int, Path]) -> None:
    engine = make_engine()
    engine.register_adapter("classifier", classifiers[3])
    for adapter in (None, "all-4", {"classifier": 0.5}, {"classifier": 1.0, "all-4": 1.0}):
        with pytest.raises(RequestError, match="only a single adapter with a classifier's head"):
            engine.add(wanted("r", [1, 2], adapter, classifies=True))
    for fields in ({"max_tokens": 1}, {"n": 2}, {"speculation": True}, {"prompt_logprobs": 0}):
        given: Any = {"max_tokens": 0, "speculation": False, "vector": VectorParams(), **fields}
        with pytest.raises(RequestError, match="a request for a vector has"):
            engine.add(request("r", [1, 2], **given))
    got = run(engine, wanted("r", prompt(1, 9), "classifier"))["r"]
    assert got.last is not None and got.last.vector is not None and len(got.last.vector) == 64


# Over the GPU runner: on a card under `make test-gpu`; elsewhere Triton's interpreter runs it.


@pytest.fixture
def gpu_engine(make_engine: MakeEngine, classifiers: dict[int, Path]) -> Iterator[Engine]:
    engine = make_gpu_engine(make_engine, max_running=8, max_step_tokens=24)
    engine.register_adapter("classifier", classifiers[50])
    yield engine


def test_on_a_gpu(
    gpu_engine: Engine,
    oracle: Oracle,
    vectors: Vectors,
    classifiers: dict[int, Path],
    tiny_model: Path,
) -> None:
    """Vectors beside decodes; the last layers compute rows that nobody samples."""
    long = prompt(8, 6)
    asked = [request("long", long, adapter="all-4", max_tokens=3)]
    kinds = dict(zip(["all-4", None, "dora"], Pooling, strict=True))
    prompts = {str(name): prompt(i, 5 + 9 * i) for i, name in enumerate(kinds)}
    asked += [wanted(str(n), prompts[str(n)], n, pooling=kind) for n, kind in kinds.items()]
    asked.append(wanted("labels", prompt(3, 12), "classifier", classifies=True))
    results = run(gpu_engine, *asked, check=True)
    for name, kind in kinds.items():
        got = results[str(name)].last
        assert got is not None and got.vector is not None
        assert got.vector == pytest.approx(vectors.of(prompts[str(name)], name, kind), abs=1e-3)
    labels = results["labels"].last
    expected = probabilities(tiny_model, classifiers[50], prompt(3, 12), 50)
    assert labels is not None and labels.vector == pytest.approx(expected, abs=1e-3)
    assert results["long"].token_ids == oracle.generate(long, 3, "all-4")
