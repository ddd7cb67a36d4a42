"""Drafts change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine import Engine, FinishReason, Request
from engine.drafts.costs import CPU
from engine.drafts.profile import Kind, Source
from engine.drafts.proposer import Proposal
from engine.sequence import Sequence
from tests.engine.conftest import MakeEngine, Oracle, Result, name_of, prompt, request, run
from tests.engine.execution.ahead_runner import AheadRunner
from tests.schema_cases import CHECKED, ENFORCED

pytest.importorskip("outlines")  # GPU machines do not have it

#: Without one of a step so large that its automaton takes 8 s: `controlplane.schemas` drops those.
CASES = ENFORCED | {
    f"{name}, checked": case for name, case in CHECKED.items() if name != "multipleOf"
}
#: A prompt in which the answer's text stands, so that lookup finds something.
COPIED = [
    ord(character) - 33  # as the tiny model's tokenizer has it
    for character in '{"customer_number":"second","is_delivered":true,"again":"second"},[1,1,1,1]'
]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "customer_number": {"enum": ["first", "second"]},
            "is_delivered": {"type": "boolean"},
            "again": {"enum": ["first", "second"]},
        },
        "required": ["customer_number", "is_delivered", "again"],
        "additionalProperties": False,
    }
)
ADAPTERS = (None, "all-4", "qv-16", "dora", "ends", {"all-4": 0.5, "mlp-rs": 1.5})


def ready(engine: Engine) -> Engine:
    """The engine, once it has read what its first grammar needs."""
    engine.prepare_grammars().result(300)
    return engine


def both(make_engine: MakeEngine, *requests: Request, **config: Any) -> dict[str, Result]:
    """What requests generate with drafts, after seeing that it is what they do without.

    Then once more with planted drafts, of which about half are right: a random model repeats
    itself so seldom that lookup alone would try little.
    """
    plain = run(ready(make_engine(**config)), *requests)
    engine = ready(make_engine(speculation=True, **config))
    drafted = run(engine, *requests, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.drafts.speculation.propose", planted(plain))
        found = run(ready(make_engine(speculation=True, **config)), *requests, check=True)
    assert drafted.keys() == plain.keys() == found.keys()
    for name, expected in plain.items():
        same(drafted[name], expected)
        same(found[name], expected)
    num_tokens = sum(len(result.token_ids) for result in plain.values())
    assert accepted(found) > num_tokens / 4
    return drafted


def planted(answers: dict[str, Result]) -> Callable[..., Proposal]:
    """In place of `propose`: drafts of known answers, some of them wrong."""
    chance = random.Random(0)

    def propose(sequence: Sequence, matcher: Any, most: int, least_chance: Any) -> Proposal:
        proposal = Proposal(sequence.drafting.profile, sequence.num_tokens)
        known = answers[name_of(sequence.output())].token_ids[sequence.num_generated :]
        tokens = known[: chance.randrange(min(most, 9) + 1)]
        if tokens and chance.random() < 0.3:
            tokens[chance.randrange(len(tokens))] = chance.randrange(256)
        proposal.tokens += tokens
        proposal.kinds += [Kind(Source.LOOKUP, 3)] * len(tokens)
        return proposal

    return propose


def same(own: Result, other: Result) -> None:
    assert own.token_ids == other.token_ids
    assert own.finish_reason == other.finish_reason
    assert type(own.error) is type(other.error)
    assert len(own.logprobs) == len(other.logprobs)
    for entry, expected in zip(own.logprobs, other.logprobs, strict=True):
        assert entry.token_id == expected.token_id
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert own.last is not None and other.last is not None
    assert own.last.num_generated == other.last.num_generated


def accepted(results: dict[str, Result]) -> int:
    return sum(r.last.num_accepted_drafts for r in results.values() if r.last is not None)


def test_schemas_with_adapters_in_one_batch(make_engine: MakeEngine) -> None:
    requests = [
        request(
            name,
            COPIED + prompt(i, 10),
            adapter=ADAPTERS[i % len(ADAPTERS)],
            json_schema=json.dumps(case.schema),
            max_tokens=24,
            ignore_eos=False,
        )
        for i, (name, case) in enumerate(CASES.items())
        if i % 9 == 0  # all of them in the long test below
    ]
    results = both(make_engine, *requests, max_running=16, max_step_tokens=256)
    assert accepted(results) > len(requests)


def test_forced_text_needs_few_steps(make_engine: MakeEngine) -> None:
    engine = ready(make_engine(speculation=True))
    result = run(engine, request("a", prompt(0, 20), json_schema=SCHEMA, max_tokens=100))["a"]
    stats = engine.stats()
    assert result.finish_reason == FinishReason.STOP
    assert stats.drafts["forced"].accepted > 20
    assert stats.step < stats.num_generated / 2
    [profile] = engine._speculation._profiles._profiles.values()
    assert profile.rate(Kind(Source.FORCED)) == 1.0, "wrong though those before it were right"


def test_a_step_gives_a_sequence_one_output(make_engine: MakeEngine) -> None:
    engine, results = ready(make_engine(speculation=True)), {"a": Result(), "a/1": Result()}
    engine.add(request("a", prompt(0, 20), json_schema=SCHEMA, max_tokens=100, n=2, logprobs=1))
    most = 0
    while engine.has_work():
        outputs = engine.step()
        names = [name_of(output) for output in outputs]
        assert len(names) == len(set(names))
        for name, output in zip(names, outputs, strict=True):
            assert len(output.logprobs or ()) == len(output.token_ids)
            most = max(most, len(output.token_ids))
            results[name].add(output)
            assert len(results[name].token_ids) <= output.num_generated
    assert most > 5 and all(r.finish_reason == FinishReason.STOP for r in results.values())


def test_forced_text_needs_no_logits_unless_they_are_told(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ready(make_engine(speculation=True))
    compute, counts = engine._runner.run, []

    def counted(batch: Any) -> Any:
        logits = compute(batch)
        counts.append(len(logits))
        return logits

    monkeypatch.setattr(engine._runner, "run", counted)
    own: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 100}
    plain = run(engine, request("a", prompt(0, 20), **own))["a"]
    few = sum(counts)
    counts.clear()
    told = run(engine, request("b", prompt(0, 20), logprobs=0, **own))["b"]
    assert told.token_ids == plain.token_ids
    assert few + 20 < sum(counts)


def test_what_an_adapter_chose_last_is_drafted_for_the_same_tenant_only(
    make_engine: MakeEngine,
) -> None:
    engine = ready(make_engine(speculation=True, prefix_cache=False))

    def num_choices(name: str, tenant_id: str) -> int:
        before = engine.stats().drafts["choice"].drafted
        own = request(name, prompt(0, 20), json_schema=SCHEMA, tenant_id=tenant_id, adapter="all-4")
        run(engine, own)
        return engine.stats().drafts["choice"].drafted - before

    first = num_choices("one", "acme")
    assert num_choices("two", "acme") > first
    assert num_choices("three", "globex") == first
    engine.unregister_adapter("all-4")
    assert not len(engine._speculation._profiles) or all(
        not key[1] for key in engine._speculation._profiles._profiles
    )


@pytest.mark.parametrize("last", range(4, 30, 3))
def test_an_answer_ends_inside_a_forced_run(make_engine: MakeEngine, last: int) -> None:
    results = both(
        make_engine, request("a", prompt(0, 20), json_schema=SCHEMA, max_tokens=last, logprobs=2)
    )
    assert len(results["a"].token_ids) == last
    assert results["a"].finish_reason == FinishReason.LENGTH


def test_sampled_tokens_are_the_same_for_a_seed(make_engine: MakeEngine) -> None:
    requests = [
        request(
            str(i),
            COPIED * 2 + prompt(i % 3, 5),
            adapter=ADAPTERS[i % len(ADAPTERS)],
            json_schema=SCHEMA if i % 2 else None,
            n=1 + i % 3,
            max_tokens=30,
            temperature=(0.3, 1.0)[i % 2],
            top_p=(1.0, 0.9, 0.5)[i % 3],
            top_k=(0, 5)[i % 2],
            seed=7,
            logprobs=i % 2 or None,
            repetition_penalty=(1.0, 1.1)[i % 4 == 3],
            presence_penalty=(0.0, 0.5)[i % 5 == 1],
            frequency_penalty=(0.0, 0.2)[i % 5 == 2],
            logit_bias={97: 2.0} if i % 7 == 0 else {},
            min_tokens=i % 4,
            ignore_eos=False,
        )
        for i in range(24)
    ]
    both(make_engine, *requests, max_running=8)


def test_free_text(make_engine: MakeEngine) -> None:
    requests = [request(str(i), prompt(i, 30), max_tokens=60, n=1 + i % 2) for i in range(3)]
    both(make_engine, *requests)
    both(make_engine, *requests, max_step_tokens=8)
    both(make_engine, *requests, max_context=64)


def test_preempted_requests(make_engine: MakeEngine) -> None:
    """With so few pages that requests take them from each other, and drafts find none."""
    requests = [
        request(str(i), COPIED[: 30 + i] * 2, max_tokens=60, json_schema=SCHEMA if i % 2 else None)
        for i in range(6)
    ]
    room = (4 << 20) - 32 * 8192  # so that 32 pages are left to KV
    config: dict[str, Any] = {"min_adapter_bytes": room, "max_running": 6, "prefix_cache": False}
    engine = ready(make_engine(speculation=True, **config))
    run(engine, *requests, check=True)
    assert engine.stats().num_preemptions > 0
    both(make_engine, *requests, **config)


def test_cancelled_in_mid_draft(make_engine: MakeEngine) -> None:
    stays = request("stays", COPIED, json_schema=SCHEMA, max_tokens=100)
    plain = run(ready(make_engine()), stays)["stays"]
    engine = ready(make_engine(speculation=True))
    engine.add(request("gone", COPIED, json_schema=SCHEMA, max_tokens=100, n=2))
    engine.add(stays)
    results: dict[str, Result] = {}
    while engine.has_work():
        for output in engine.step():
            results.setdefault(name_of(output), Result()).add(output)
        engine.check_integrity()
        if len(results) == 3:
            engine.cancel("gone")
    for name in ("gone", "gone/1"):
        own = results[name]
        assert own.finish_reason == FinishReason.CANCELLED
        assert own.token_ids == plain.token_ids[: len(own.token_ids)]
        assert own.last is not None and own.last.num_generated == len(own.token_ids)
    same(results["stays"], plain)


def test_a_request_may_turn_it_off(make_engine: MakeEngine) -> None:
    engine = ready(make_engine(speculation=True))
    result = run(engine, request("a", COPIED, json_schema=SCHEMA, max_tokens=60, speculation=False))
    assert engine.stats().tokens_per_step == 1.0
    assert result["a"].last is not None and result["a"].last.num_rejected_drafts == 0
    assert make_engine().stats().drafts == {}


@pytest.mark.parametrize("is_ahead", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    "count",
    [  # three minutes on a quiet machine
        3200,
        pytest.param(102_400, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_drafts_do_not_move_the_distribution(
    make_engine: MakeEngine,
    oracle: Oracle,
    count: int,
    is_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A draft wherever there is one.
    monkeypatch.setattr(
        "engine.drafts.speculation.CPU", replace(CPU, times=((0, 1.0), (1, 1.0)), waiting=0.0)
    )
    engine = ready(make_engine(speculation=True))
    if is_ahead:  # tokens are chosen as a GPU chooses them: all of a step at once
        AheadRunner(engine)
    check_draws(engine, oracle, count)


def check_draws(engine: Engine, oracle: Oracle, count: int) -> None:
    """Chi-square over the sixteen answers, against what the model's logits say."""
    own, letters = prompt(3, 20), [ord(letter) - 33 for letter in "abcd"]
    expected = {}
    firsts = oracle.logprobs(own)[-1][letters].softmax(0)
    for first, chance in zip(letters, firsts.tolist(), strict=True):
        seconds = oracle.logprobs([*own, first])[-1][letters].softmax(0)
        for second, other in zip(letters, seconds.tolist(), strict=True):
            expected[first, second] = chance * other
    found: Counter[tuple[int, ...]] = Counter()
    options: dict[str, Any] = {
        "regex": "[abcd]{2}",
        "temperature": 1.0,
        "n": 64,
        "ignore_eos": False,
    }
    for i in range(count // 64):
        results = run(engine, request(str(i), own, seed=1000 * i, **options))
        found.update(tuple(result.token_ids) for result in results.values())
    drafted = engine.stats().drafts["choice"]
    assert found.keys() <= expected.keys() and found.total() == count
    assert count / 10 < drafted.accepted < drafted.drafted - count / 10
    square = sum((found[key] - count * p) ** 2 / (count * p) for key, p in expected.items())
    assert square < 44.3, "a chance of one in ten thousand"


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_every_schema_and_prompt(make_engine: MakeEngine, part: int) -> None:
    """All schemas of the suite, three prompts and adapters each: more than 200 in all."""
    requests = [
        request(
            f"{name} {i}",
            (COPIED if i == 1 else []) + prompt(10 * number + i, 10 + 7 * i),
            adapter=ADAPTERS[(number + i) % len(ADAPTERS)],
            json_schema=json.dumps(case.schema),
            max_tokens=40,
            ignore_eos=False,
            logprobs=1 if i == 2 else None,
        )
        for number, (name, case) in enumerate(CASES.items())
        for i in range(3)
        if number % 4 == part
    ]
    assert 4 * len(requests) > 200
    results = both(make_engine, *requests, max_running=16, max_step_tokens=256)
    assert accepted(results) > len(requests)
