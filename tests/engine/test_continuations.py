"""n continuations of one prompt: its pages are computed once, everything else is each one's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import Engine, FinishReason, RequestError, RequestOutput
from tests.engine.conftest import MakeEngine, Oracle, Result, prompt, request, run

PAGE_BYTES = 2048 * 4
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 40, "max_tokens": 12}


def names(n: int) -> list[str]:
    return ["r", *(f"r/{i}" for i in range(1, n))]


def alone(make_engine: MakeEngine, length: int, n: int, **changes: Any) -> list[list[int]]:
    """What requests of their own draw with the seeds that n continuations have."""
    engine = make_engine()
    tokens = []
    for i in range(n):
        made = request("r", prompt(3, length), **{**SAMPLED, "seed": 40 + i, **changes})
        tokens.append(run(engine, made)["r"].token_ids)
    return tokens


def tokens_of(results: dict[str, Result], n: int) -> list[list[int]]:
    return [results[name].token_ids for name in names(n)]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [5, 16, 47, 48, 49])
def test_each_draws_what_a_request_of_its_seed_draws(
    make_engine: MakeEngine, length: int, prefix_cache: bool
) -> None:
    wanted = alone(make_engine, length, 4, adapter="all-4")
    engine = make_engine(prefix_cache=prefix_cache, max_step_tokens=20)
    made = request("r", prompt(3, length), n=4, adapter="all-4", **SAMPLED)
    results = run(engine, made, check=True)
    assert tokens_of(results, 4) == wanted
    assert len({tuple(tokens) for tokens in wanted}) == 4


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_is_computed_and_held_once(make_engine: MakeEngine, prefix_cache: bool) -> None:
    engine = make_engine(prefix_cache=prefix_cache)
    engine.add(request("r", prompt(3, 70), n=5, max_tokens=4))
    num_computed = 0
    for _ in range(2):
        engine.step()
        num_computed = sum(s.num_computed for s in engine._scheduler.running)
    assert engine.stats().running == 5
    assert engine.stats().kv_pages == 4 + 5  # four full pages, and a last one each
    assert num_computed == 71 + 4 * 70
    results = run(engine)
    for name in names(5):
        last = results[name].last
        assert last is not None and last.num_generated == 4
        assert (last.num_prompt_tokens, last.num_cached_tokens) == (70, 0)


def test_what_strangers_computed_counts_as_cached(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run(engine, request("before", prompt(3, 40), max_tokens=1))
    results = run(engine, request("r", prompt(3, 70), n=3, max_tokens=2))
    assert [results[name].last.num_cached_tokens for name in names(3)] == [32] * 3  # type: ignore[union-attr]


def test_greedy_ones_are_equal_and_end_on_their_own(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    results = run(make_engine(), request("r", prompt(1, 20), n=3, max_tokens=6, logprobs=2))
    for name in names(3):
        assert results[name].token_ids == oracle.generate(prompt(1, 20), 6)
        assert [entry.token_id for entry in results[name].logprobs] == results[name].token_ids
        assert results[name].finish_reason == FinishReason.LENGTH


def test_a_stop_token_ends_one_and_leaves_the_rest(make_engine: MakeEngine) -> None:
    drawn = alone(make_engine, 9, 4)
    stop = next(t for t in drawn[0] if all(t not in other for other in drawn[1:]))
    results = run(make_engine(), request("r", prompt(3, 9), n=4, stop_token_ids=(stop,), **SAMPLED))
    assert tokens_of(results, 4) == [drawn[0][: drawn[0].index(stop)], *drawn[1:]]
    reasons = [results[name].finish_reason for name in names(4)]
    assert reasons == [FinishReason.STOP, *[FinishReason.LENGTH] * 3]


def test_preempted_ones_draw_the_same(make_engine: MakeEngine) -> None:
    wanted = alone(make_engine, 40, 4, max_tokens=80)
    for prefix_cache in (True, False):
        engine = make_engine(arena_bytes=60 * PAGE_BYTES, prefix_cache=prefix_cache)
        crowd = [request(f"o{i}", prompt(i, 100), max_tokens=80) for i in range(5)]
        made = request("r", prompt(3, 40), n=4, **{**SAMPLED, "max_tokens": 80})
        results = run(engine, *crowd, made, check=True)
        assert engine.stats().num_preemptions > 0
        assert tokens_of(results, 4) == wanted


def test_more_than_may_run_at_a_time(make_engine: MakeEngine) -> None:
    for prefix_cache in (True, False):
        engine = make_engine(max_running=2, prefix_cache=prefix_cache)
        results = run(engine, request("r", prompt(3, 33), n=5, **SAMPLED), check=True)
        assert tokens_of(results, 5) == alone(make_engine, 33, 5)


def _outputs(engine: Engine, num_steps: int) -> list[RequestOutput]:
    outputs = []
    for _ in range(num_steps):
        outputs += engine.step()
        engine.check_integrity()
    return outputs


def test_cancel_at_every_moment_ends_all(make_engine: MakeEngine) -> None:
    engine = make_engine(max_step_tokens=16, max_running=3)
    for num_steps in range(10):
        engine.add(request("r", prompt(2, 40), n=4, **SAMPLED))
        outputs = _outputs(engine, num_steps)
        engine.cancel("r")
        engine.cancel("r")
        outputs += _outputs(engine, 2)
        assert not engine.has_work()
        ends = [(o.index, o.finish_reason) for o in outputs if o.finish_reason]
        assert sorted(ends) == [(i, FinishReason.CANCELLED) for i in range(4)]
        assert engine.stats().kv_pages == 0


def test_an_error_ends_all(make_engine: MakeEngine) -> None:
    now = [0.0]
    engine = make_engine(clock=lambda: now[0])
    engine.add(request("r", prompt(2, 40), n=3, deadline=5.0))
    _outputs(engine, 3)
    now[0] = 5.0
    ends = [o for o in _outputs(engine, 1) if o.finish_reason]
    assert [(o.index, o.finish_reason) for o in ends] == [(i, FinishReason.ERROR) for i in range(3)]


def test_each_obeys_the_grammar(make_engine: MakeEngine) -> None:
    schema = json.dumps({
        "type": "object",
        "properties": {"a": {"enum": [1, 22, 333]}},
        "required": ["a"],
        "additionalProperties": False,
    })  # fmt: skip
    made = request("r", prompt(0, 4), n=4, json_schema=schema, temperature=2.0, seed=1)
    results = run(make_engine(), made)
    texts = [bytes_of(results[name].token_ids) for name in names(4)]
    assert all(json.loads(text)["a"] in (1, 22, 333) for text in texts)
    assert len(set(texts)) > 1


def bytes_of(token_ids: list[int]) -> str:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return "".join(alphabet[t] for t in token_ids).replace("Ġ", " ")


@pytest.mark.parametrize("n", [0, -1, 65])
def test_a_number_out_of_range_is_refused(make_engine: MakeEngine, n: int) -> None:
    with pytest.raises(RequestError) as raised:
        make_engine().add(request("r", [1], n=n))
    assert raised.value.param == "n"


def test_one_can_end_while_the_others_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    wanted = run(engine, request("r", prompt(3, 20), n=3, **SAMPLED))
    engine.add(request("r", prompt(3, 20), n=3, **SAMPLED))
    engine.step()
    engine.cancel("r", FinishReason.STOP, 1)
    engine.cancel("r", FinishReason.STOP, 7)  # there is none
    results = run(engine, check=True)
    assert results["r/1"].finish_reason is FinishReason.STOP
    assert len(results["r/1"].token_ids) < len(wanted["r/1"].token_ids)
    for name in ("r", "r/2"):
        assert results[name].token_ids[-8:] == wanted[name].token_ids[-8:]
        assert results[name].finish_reason is FinishReason.LENGTH
