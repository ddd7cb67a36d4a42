"""Runs over pairs of answers: TRL's DPOTrainer, computed slowly, and the company of other runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from engine.training.errors import RunRefused
from engine.training.run import HeldOut, RunRequest, RunRows, RunSettings
from engine.training.schedule import learning_rate
from tests.engine.training.scenes import (
    VOCABULARY,
    Result,
    difference,
    load,
    make_trainer,
    note,
    peft_model,
    request,
    train,
)

SETTINGS = RunSettings(
    rank=4, alpha=8, steps=20, batch_size=3, learning_rate=3e-3, warmup_steps=2, order="given",
    beta=0.3,
)  # fmt: skip
FIGURES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


def make_pairs(seed: int, count: int = 7) -> RunRows:
    """Random prompts of 1 to 9 tokens, each with two answers of 1 to 9."""
    generator = torch.Generator().manual_seed(seed)

    def some() -> list[int]:
        length = int(torch.randint(1, 10, (), generator=generator))
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    rows = []
    for _ in range(count):
        prompt = some()
        for answer in (some(), some()):
            rows.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    return RunRows.of(rows)


def pairs_request(name: str = "dpo", seed: int = 5, **changes: Any) -> RunRequest:
    settings = dataclasses.replace(SETTINGS, **changes.pop("settings", {}))
    return RunRequest(run_id=name, rows=make_pairs(seed), settings=settings, **changes)


def dpo_by_the_formulas(
    folder: Path, asked: RunRequest
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """TRL's DPOTrainer, `loss_type="sigmoid"`: one row at a time, by autograd; and the adapter."""
    settings, rows, beta = asked.settings, asked.rows, asked.settings.beta
    assert beta is not None
    model = peft_model(folder, settings)
    named = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    for name, tensor in (asked.adapter or {}).items():
        named[name].data.copy_(tensor)

    def log_probability(row: int) -> torch.Tensor:
        own = slice(rows.starts[row], rows.starts[row + 1])
        tokens, marks = rows.token_ids[own].long(), rows.is_answer[own]
        log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        of_tokens: torch.Tensor = log_probs.gather(1, tokens[1:, None])[:, 0]
        return of_tokens[marks[1:]].sum()

    with torch.no_grad():
        reference = [log_probability(row) for row in range(len(rows))]
    optimizer = torch.optim.AdamW(named.values(), weight_decay=settings.weight_decay)
    told, pairs = [], len(rows) // 2
    for step in range(settings.steps):
        first = step % -(-pairs // settings.batch_size) * settings.batch_size
        batch = range(first, min(first + settings.batch_size, pairs))
        rewards = (
            torch.stack(
                [
                    log_probability(2 * pair + k) - reference[2 * pair + k]
                    for pair in batch
                    for k in (0, 1)
                ]
            ).view(-1, 2)
            * beta
        )
        margins = rewards[:, 0] - rewards[:, 1]
        loss = -functional.logsigmoid(margins).mean()
        means = (*rewards.mean(0), margins.mean(), (margins > 0).float().mean())
        told.append({"loss": float(loss), **dict(zip(FIGURES, map(float, means), strict=True))})
        optimizer.param_groups[0]["lr"] = learning_rate(settings, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(named.values(), settings.max_grad_norm)
        optimizer.step()
    return told, {name: tensor.detach() for name, tensor in named.items()}


def test_losses_rewards_and_margins_are_those_of_trls_formulas(tiny: Path) -> None:
    asked = pairs_request()
    wanted, adapter = dpo_by_the_formulas(tiny, asked)
    ours = train(make_trainer(load(tiny)), [asked])[asked.run_id]
    assert len(ours.progress) == len(wanted) == 20
    compare(ours, wanted)
    assert difference(ours.adapter, adapter) < 1e-4
    assert ours.losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert ours.losses[-1] < 0.5  # it has learned something that might differ


def test_the_reference_of_a_continued_adapter_is_that_adapter(tiny: Path) -> None:
    trainer = make_trainer(load(tiny))
    before = train(trainer, [request("sft", RunSettings(rank=4, alpha=8, steps=5))])["sft"]
    asked = pairs_request(adapter=before.adapter)
    wanted, _ = dpo_by_the_formulas(tiny, asked)
    ours = train(trainer, [asked])[asked.run_id]
    compare(ours, wanted)
    assert ours.losses[0] == pytest.approx(0.6931, abs=1e-4)


def compare(ours: Result, wanted: list[dict[str, float]]) -> None:
    for number, (made, step) in enumerate(zip(ours.progress, wanted, strict=True)):
        assert made.loss == pytest.approx(step["loss"], abs=1e-4)
        # Before the first update a margin is zero but for rounding, and so above it or not.
        for name in FIGURES[: 3 if number == 0 else 4]:
            assert made.rewards[name] == pytest.approx(step[name], abs=1e-4), (number, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pairs_and_chats_in_one_batch_give_what_each_gives_alone(
    tiny: Path, dtype: torch.dtype
) -> None:
    model = load(tiny, dtype)
    held_out = HeldOut(rows=make_pairs(8, 3), every=4)
    asked = [
        pairs_request("dpo", held_out=held_out),
        request("sft", RunSettings(rank=8, steps=20, batch_size=2, learning_rate=3e-3)),
        pairs_request("short", seed=6, settings={"steps": 1, "order": "group_by_length"}),
    ]
    together = train(make_trainer(model), asked)
    bound = 1e-9 if dtype == torch.float64 else 1e-4
    for each in asked:
        alone = train(make_trainer(model, runs_a_pass=1), [each])[each.run_id]
        shared = together[each.run_id]
        assert shared.losses == pytest.approx(alone.losses, abs=bound)
        for one, other in zip(shared.progress, alone.progress, strict=True):
            assert one.validation_loss == pytest.approx(other.validation_loss, abs=bound)
        assert difference(shared.adapter, alone.adapter) < bound
    validated = [each for each in together["dpo"].progress if each.validation_loss is not None]
    assert [each.step for each in validated] == [4, 8, 12, 16, 20]
    assert set(validated[0].rewards) == {*FIGURES, *(f"validation_{name}" for name in FIGURES)}


@pytest.mark.parametrize("micro_batches", [0, 2, 9, 23])
def test_a_run_resumes_from_its_state_to_the_bit(tiny: Path, micro_batches: int) -> None:
    asked = pairs_request(held_out=HeldOut(rows=make_pairs(8, 3), every=4))
    whole = train(make_trainer(load(tiny)), [asked])[asked.run_id]
    first = make_trainer(load(tiny))
    first.add(asked)
    results: dict[str, Result] = {}
    for _ in range(micro_batches + 1):
        note(results, first.step())
    saved = first.checkpoint(asked.run_id)
    assert saved is not None and (saved.step > 0) == (micro_batches > 8)
    second = make_trainer(load(tiny))
    after: dict[str, Result] = {}
    second.add(asked, saved)
    while second.has_work:
        note(after, second.step())
    resumed = after[asked.run_id]
    assert resumed.progress == whole.progress[-len(resumed.progress) :]
    assert difference(resumed.adapter, whole.adapter) == 0


def test_a_state_without_the_reference_is_refused(tiny: Path) -> None:
    asked, trainer = pairs_request(), make_trainer(load(tiny))
    trainer.add(asked)
    while (saved := trainer.checkpoint(asked.run_id)) is None or not saved.step:
        trainer.step()
    trainer.close()
    trainer.step()
    del saved.tensors["reference"]
    with pytest.raises(RunRefused, match="its reference is not that of these rows"):
        trainer.add(asked, saved)


def test_an_odd_number_of_rows_is_refused(tiny: Path) -> None:
    asked = request("odd", SETTINGS, count=9)
    with pytest.raises(RunRefused, match="9 rows are no pairs"):
        make_trainer(load(tiny)).add(asked)
    pairs = pairs_request(held_out=HeldOut(rows=asked.rows, every=1))
    with pytest.raises(RunRefused, match="9 rows are no pairs"):
        make_trainer(load(tiny)).add(pairs)
