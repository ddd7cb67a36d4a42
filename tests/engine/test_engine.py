"""The engine's manners: errors, endings, limits, statistics; nobody else notices."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from contract.messages.sampling import BIAS, RANGES
from engine import (
    AdapterPart,
    ContextTooLong,
    DeadlineExceeded,
    Engine,
    EngineConfig,
    FinishReason,
    InvalidPrompt,
    OutOfPages,
    Request,
    RequestError,
    SamplingParams,
    UnknownAdapter,
    UnsupportedModel,
)
from tests.engine.conftest import ADAPTERS, MakeEngine, Oracle, prompt, request, run, save_model
from tests.range_ends import inside, outside


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"prompt": []}, InvalidPrompt, "token_ids"),
        ({"prompt": [257]}, InvalidPrompt, "token_ids"),
        ({"prompt": [-1]}, InvalidPrompt, "token_ids"),
        ({"prompt": [1] * 512}, ContextTooLong, "token_ids"),
        ({"adapter": "nobody"}, UnknownAdapter, "adapters"),
        ({"adapter": {"all-4": 1.0, "nobody": 1.0}}, UnknownAdapter, "adapters"),
        ({"adapter": {"all-4": float("nan")}}, RequestError, "adapters"),
        ({"temperature": -1.0}, RequestError, "temperature"),
        ({"temperature": float("inf")}, RequestError, "temperature"),
        ({"top_p": -0.1}, RequestError, "top_p"),
        ({"top_k": -2}, RequestError, "top_k"),
        ({"max_tokens": -1}, RequestError, "max_tokens"),
        ({"prompt_logprobs": 21}, RequestError, "prompt_logprobs"),
        ({"logprobs": 21}, RequestError, "logprobs"),
        ({"logit_bias": {257: 1.0}}, RequestError, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, RequestError, "logit_bias"),
        ({"stop_token_ids": (999,)}, RequestError, "stop_token_ids"),
        ({"seed": 2**63}, RequestError, "seed"),
        ({"repetition_penalty": 0.0}, RequestError, "repetition_penalty"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_by_field(
    make_engine: MakeEngine, change: dict[str, object], error: type[Exception], param: str
) -> None:
    engine = make_engine()
    fields = {"prompt": [1, 2, 3], **change}
    with pytest.raises(error) as raised:
        engine.add(request("r", **fields))  # type: ignore[arg-type]
    assert raised.value.param == param  # type: ignore[attr-defined]
    assert not engine.has_work()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 2.5}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {1.5: 2.0}}, "logit_bias"),
        ({"logit_bias": {True: 2.0}}, "logit_bias"),
        ({"logit_bias": {1: "2"}}, "logit_bias"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 10**400}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"min_tokens": 0.5}, "min_tokens"),
        ({"temperature": None}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"stop_token_ids": ("1",)}, "stop_token_ids"),
        ({"stop_token_ids": None}, "stop_token_ids"),
        ({"n": 1.5}, "n"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"priority": "urgent"}, "priority"),
        ({"tenant_id": b"acme"}, "tenant_id"),
        ({"json_schema": {}}, "json_schema"),
        ({"adapter": {"all-4": 1e39}}, "adapters"),
        ({"adapter": {"all-4": 10**400}}, "adapters"),
        ({"adapter": {"all-4": "1"}}, "adapters"),
    ],
    ids=lambda value: str(value)[:30] if not isinstance(value, str) else value,
)
def test_what_is_no_number_is_refused_by_name(
    make_engine: MakeEngine, fields: dict[str, Any], param: str
) -> None:
    engine = make_engine()
    with pytest.raises(RequestError) as raised:
        engine.add(request("r", [1, 2], **fields))
    assert raised.value.param == param
    assert not engine.has_work()


@pytest.mark.parametrize("name", [*RANGES, "logit_bias"])
def test_sampling_parameters_have_the_ranges_of_the_table(
    make_engine: MakeEngine, name: str
) -> None:
    allowed = RANGES.get(name, BIAS)

    def add(value: Any) -> None:
        fields: dict[str, Any] = {name: {7: value} if name == "logit_bias" else value}
        make_engine().add(request("r", [1, 2], **{"max_tokens": 5, **fields}))

    for value in inside(allowed):
        if name != "max_tokens" or value < 500:  # else the context is too short
            add(value)
    for value in outside(allowed):
        with pytest.raises(RequestError) as raised:
            add(value)
        assert raised.value.param == name


@pytest.mark.parametrize("token_ids", [[1, 2.5], ["1"], [None], [10**30], 5, b"abc"], ids=str)
def test_a_prompt_that_is_no_token_ids_is_refused(make_engine: MakeEngine, token_ids: Any) -> None:
    with pytest.raises(InvalidPrompt):
        make_engine().add(request("r", token_ids))


def test_a_request_id_in_use_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("r", [1], max_tokens=2))
    with pytest.raises(RequestError):
        engine.add(request("r", [1], max_tokens=2))
    run(engine)
    engine.add(request("r", [1], max_tokens=2))  # free again


def test_a_blend_that_names_one_adapter_twice_is_refused(make_engine: MakeEngine) -> None:
    parts = (AdapterPart(digest="all-4"), AdapterPart(digest="all-4"))
    with pytest.raises(RequestError):
        make_engine().add(
            Request(request_id="r", token_ids=[1], sampling=SamplingParams(), adapters=parts)
        )


def test_a_weight_may_be_an_integer(make_engine: MakeEngine) -> None:
    """It once ended the engine: prompts of a page or more are hashed with their weights."""
    engine, long = make_engine(), prompt(3, 40)
    whole = run(engine, request("r", long, adapter={"all-4": 1}, max_tokens=3))["r"]
    again = run(engine, request("r", long, adapter={"all-4": 1.0}, max_tokens=3))["r"]
    assert whole.token_ids == again.token_ids
    assert again.last is not None and again.last.num_cached_tokens == 32


def test_a_prompt_larger_than_the_arena_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=70 * 2048 * 4, page_size=16, max_context=512)
    with pytest.raises(OutOfPages):
        engine.add(request("r", [1] * 400, adapter={"all-64": 1.0, "qv-16": 1.0}))
    engine.check_integrity()


def test_growing_out_of_the_arena_ends_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=66 * 2048 * 4)
    results = run(engine, request("r", [1] * 16, adapter="all-64", max_tokens=500))
    # The adapter holds most pages, and there is nobody else to preempt.
    assert isinstance(results["r"].error, OutOfPages)
    assert len(results["r"].token_ids) > 50
    after = run(engine, request("next", [1] * 16, max_tokens=4))
    assert after["next"].finish_reason == FinishReason.LENGTH


def test_the_context_limit_ends_with_length(make_engine: MakeEngine) -> None:
    got = run(make_engine(max_context=32), request("r", [1] * 30))["r"]
    assert got.finish_reason == FinishReason.LENGTH
    assert len(got.token_ids) == 2


def test_eos_and_stop_tokens_end_without_being_text(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    engine = make_engine()
    tokens = oracle.generate(prompt(2, 9), 20)
    stop = tokens[7]
    end = tokens.index(stop)
    got = run(engine, request("r", prompt(2, 9), max_tokens=20, stop_token_ids=(stop,)))["r"]
    assert got.finish_reason == FinishReason.STOP
    assert got.token_ids == tokens[:end]
    assert got.last is not None and got.last.num_generated == end + 1
    forced = run(engine, request("e", prompt(2, 9), logit_bias={256: 100.0}, ignore_eos=False))["e"]
    assert forced.token_ids == [] and forced.finish_reason == FinishReason.STOP


def test_min_tokens_holds_stop_tokens_back(make_engine: MakeEngine) -> None:
    got = run(
        make_engine(),
        request("r", [1, 2], logit_bias={256: 100.0}, ignore_eos=False, min_tokens=5, max_tokens=9),
    )["r"]
    assert len(got.token_ids) == 5
    assert got.finish_reason == FinishReason.STOP


def test_cancel_at_every_moment(make_engine: MakeEngine, oracle: Oracle) -> None:
    """Cancelled after 0, 1, 2 … steps: one last output each, nothing leaks, others go on."""
    engine = make_engine(max_step_tokens=16)
    for num_steps in range(9):
        engine.add(request("keep", prompt(1, 20), adapter="qv-16", max_tokens=6))
        engine.add(request("gone", prompt(2, 40), adapter="all-4", max_tokens=100))
        outputs = [output for _ in range(num_steps) for output in engine.step()]
        engine.cancel("gone")
        engine.cancel("gone")
        engine.cancel("never-was")
        while engine.has_work():
            outputs += engine.step()
            engine.check_integrity()
        last = [o for o in outputs if o.request_id == "gone" and o.finish_reason]
        assert [o.finish_reason for o in last] == [FinishReason.CANCELLED]
        kept = [t for o in outputs if o.request_id == "keep" for t in o.token_ids]
        assert kept == oracle.generate(prompt(1, 20), 6, "qv-16")


def test_an_unregistered_adapter_leaves_nothing_behind(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle
) -> None:
    """Not even a copy that another adapter of its name would be answered with."""
    engine = make_engine(prefix_cache=False)
    for path in ("all-4", "qv-16"):
        engine.unregister_adapter("all-4")
        engine.register_adapter("all-4", adapters[path])
        got = run(engine, request("r", prompt(3, 12), adapter="all-4", max_tokens=8))["r"]
        assert got.token_ids == oracle.generate(prompt(3, 12), 8, path)
    assert oracle.generate(prompt(3, 12), 8, "all-4") != got.token_ids


def test_an_adapter_of_the_same_name_finds_no_kv_of_the_one_before(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle
) -> None:
    """Nor does a prefix that was pinned for it come back; one's own KV is found as ever."""
    engine = make_engine()
    tokens = prompt(3, 70)
    for path in ("all-4", "qv-16", "all-4"):
        engine.unregister_adapter("all-4")
        engine.register_adapter("all-4", adapters[path])
        parts = request("", [1], adapter="all-4").adapters
        engine.pin_prefix(tokens[:32], adapters=parts)
        run(engine)
        for cached in (32, 64):
            got = run(engine, request("r", tokens, adapter="all-4", max_tokens=8))["r"]
            assert got.token_ids == oracle.generate(tokens, 8, path)
            assert got.last is not None and got.last.num_cached_tokens == cached
    engine.unpin_prefix(tokens[:32], adapters=parts)


def test_an_adapter_stays_itself_when_one_of_its_shape_goes(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle
) -> None:
    engine = make_engine(prefix_cache=False)
    engine.register_adapter("twin", adapters["all-4"])
    requests = [request(n, prompt(3, 12), adapter=n, max_tokens=8) for n in ("all-4", "twin")]
    run(engine, *requests)
    engine.unregister_adapter("all-4")
    got = run(engine, request("r", prompt(3, 12), adapter="twin", max_tokens=8))["r"]
    assert got.token_ids == oracle.generate(prompt(3, 12), 8, "all-4")


def test_a_caller_may_end_a_request_as_stopped(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("r", [1, 2, 3]))
    engine.step()
    engine.cancel("r", FinishReason.STOP)
    (output,) = engine.step()
    assert output.finish_reason == FinishReason.STOP
    assert output.num_generated == 1


def test_deadlines(make_engine: MakeEngine) -> None:
    now = [100.0]
    engine = make_engine(clock=lambda: now[0])
    engine.add(request("late", [1, 2, 3], deadline=101.0))
    engine.add(request("free", [1, 2, 3], max_tokens=3))
    engine.step()
    now[0] = 101.0
    results = run(engine)
    assert isinstance(results["late"].error, DeadlineExceeded)
    assert results["free"].finish_reason == FinishReason.LENGTH


def test_usage_counts(make_engine: MakeEngine) -> None:
    last = run(make_engine(), request("r", prompt(0, 33), max_tokens=4))["r"].last
    assert last is not None
    assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_generated) == (33, 0, 4)


def test_statistics(make_engine: MakeEngine) -> None:
    engine = make_engine()
    idle = engine.stats()
    assert (idle.step, idle.running, idle.waiting) == (0, 0, 0)
    assert idle.free_pages == idle.num_pages and idle.num_adapters == len(ADAPTERS)
    engine.add(request("r", prompt(0, 20), adapter="qv-16", max_tokens=3))
    assert engine.stats().waiting == 1
    while not engine.stats().running:
        engine.step()
    busy = engine.stats()
    assert busy.kv_pages == 2 and busy.adapter_pages > 0
    assert busy.resident_digests == ("qv-16",)
    assert busy.free_pages == busy.num_pages - busy.kv_pages - busy.adapter_pages


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"new_thing": 7}, "new_thing"),
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_size": 128}, "model.embed_tokens.weight"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
    ],
    ids=str,
)
def test_an_unsupported_model_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], param: str
) -> None:
    base = save_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UnsupportedModel) as raised:
        Engine(EngineConfig(model_dir=base, arena_bytes=4 << 20))
    assert raised.value.param == param


@pytest.mark.parametrize("seed", range(6))
def test_any_interleaving_ends_every_request_once_with_the_right_tokens(
    make_engine: MakeEngine, oracle: Oracle, seed: int
) -> None:
    """Random adds, cancels, registrations and steps in a tiny memory."""
    choose = random.Random(seed)
    engine = make_engine(
        arena_bytes=choose.choice([70, 90, 160]) * 2048 * 4,
        max_step_tokens=choose.choice([8, 32, 200]),
        max_running=choose.choice([2, 5, 9]),
        host_cache_bytes=choose.choice([0, 1 << 16, 1 << 24]),
        max_adapter_bytes=choose.choice([None, 58 * 2048 * 4]),
        min_adapter_bytes=choose.choice([0, 58 * 2048 * 4]),
        loader_threads=choose.choice([1, 2, 4]),
        max_prefetch=choose.choice([1, 3, 16]),
    )
    accepted: dict[str, tuple[list[int], int, str | None]] = {}
    cancelled: set[str] = set()
    got: dict[str, list[int]] = {}
    ends: dict[str, list[FinishReason]] = {}

    def step() -> None:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                ends.setdefault(output.request_id, []).append(output.finish_reason)
        engine.check_integrity()

    names = [None, "all-4", "qv-16", "patterns", "ko-1", "mlp-rs"]
    for i in range(40):
        adapter = choose.choice(names)
        tokens, count = prompt(choose.randrange(5), choose.choice([3, 17, 30])), 6
        try:
            engine.add(request(str(i), tokens, adapter=adapter, max_tokens=count))
            accepted[str(i)] = (tokens, count, adapter)
        except UnknownAdapter:
            assert adapter is not None
        if choose.random() < 0.2:
            victim = choose.choice(list(accepted) or ["0"])
            engine.cancel(victim)
            cancelled.add(victim)
        for _ in range(choose.randrange(3)):
            step()
    while engine.has_work():
        step()
    assert sorted(ends) == sorted(accepted)
    for request_id, (tokens, count, adapter) in accepted.items():
        (reason,) = ends[request_id]
        wanted = oracle.generate(tokens, count, adapter)
        if reason == FinishReason.CANCELLED:
            assert request_id in cancelled
            assert got.get(request_id, []) == wanted[: len(got.get(request_id, []))]
        else:
            assert reason == FinishReason.LENGTH
            assert got[request_id] == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"max_running": 0},
        {"max_step_tokens": 0},
        {"arena_bytes": 100},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused(
    tiny_model: Path, changes: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Engine(EngineConfig(**{"model_dir": tiny_model, **changes}))  # type: ignore[arg-type]
