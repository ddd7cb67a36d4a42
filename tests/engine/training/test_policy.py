"""Runs over sampled answers: the policy gradient, computed slowly, and other runs beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.training.errors import RunRefused
from engine.training.events import SamplesWanted
from engine.training.policy import Samples
from engine.training.run import HeldOut, RunRequest, RunRows, RunSettings
from engine.training.schedule import learning_rate
from engine.training.trainer import BatchTrainer
from tests.engine.training.scenes import (
    VOCABULARY,
    Result,
    difference,
    load,
    make_trainer,
    note,
    peft_model,
    request,
)

SETTINGS = RunSettings(
    rank=4, alpha=8, steps=8, batch_size=2, learning_rate=3e-3, warmup_steps=2, order="given",
    beta=0.3, samples=3, max_tokens=9, clip=0.2,
)  # fmt: skip


def some_tokens(generator: torch.Generator, least: int = 1) -> list[int]:
    length = int(torch.randint(least, 10, (), generator=generator))
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def make_prompts(seed: int, count: int = 5) -> RunRows:
    generator = torch.Generator().manual_seed(seed)
    prompts = [some_tokens(generator) for _ in range(count)]
    return RunRows.of((prompt, [False] * len(prompt)) for prompt in prompts)


def policy_request(name: str = "rl", seed: int = 5, **changes: Any) -> RunRequest:
    settings = dataclasses.replace(SETTINGS, **changes.pop("settings", {}))
    return RunRequest(run_id=name, rows=make_prompts(seed), settings=settings, **changes)


def answered(asked: RunRequest, wanted: SamplesWanted) -> Samples:
    """Random answers, rewards and log-probabilities: a function of the run's seed and the step."""
    generator = torch.Generator().manual_seed(1000 * asked.settings.seed + wanted.step)
    rows, count = [], asked.settings.samples or 0
    for example in wanted.examples:
        source = asked.held_out.rows if wanted.is_validation and asked.held_out else asked.rows
        prompt = source.token_ids[source.starts[example] : source.starts[example + 1]].tolist()
        for _ in range(1 if wanted.is_validation else count):
            answer = some_tokens(generator)
            rows.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    made = RunRows.of(rows)
    number = sum(made.num_answers)
    near = -5.5 + 0.4 * torch.randn(2, number, generator=generator, dtype=torch.float64)
    rewards = torch.rand(len(made), generator=generator, dtype=torch.float64)
    figures = {"reward": float(rewards.mean())}
    return Samples(rows=made, rewards=rewards, sampled=near[0], start=near[1], figures=figures)


def train_policies(trainer: BatchTrainer, requests: list[RunRequest]) -> dict[str, Result]:
    """Train runs to their ends, those that sample with the answers of `answered`."""
    results: dict[str, Result] = {}
    by_name = {each.run_id: each for each in requests}
    for each in requests:
        trainer.add(each)
    while trainer.has_work:
        assert not trainer.is_idle
        events = trainer.step()
        note(results, events)
        for event in events:
            if isinstance(event, SamplesWanted):
                trainer.give_samples(event.run_id, answered(by_name[event.run_id], event))
        trainer.check_integrity()
    return results


def policy_by_the_formulas(
    folder: Path, asked: RunRequest
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The figures of each step and the adapter: one answer at a time, by autograd."""
    settings = asked.settings
    model = peft_model(folder, settings)
    named = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), weight_decay=settings.weight_decay)
    told, prompts = [], len(asked.rows)
    for step in range(settings.steps):
        first = step % -(-prompts // settings.batch_size) * settings.batch_size
        examples = range(first, min(first + settings.batch_size, prompts))
        wanted = SamplesWanted(run_id=asked.run_id, step=step, examples=examples)
        samples, at = answered(asked, wanted), 0
        assert settings.samples and settings.max_tokens and settings.clip and settings.beta
        loss, figures = torch.zeros(()), dict.fromkeys(("kl", "entropy", "clipped"), 0.0)
        for row in range(len(samples.rows)):
            group = row // settings.samples * settings.samples
            advantage = (
                samples.rewards[row] - samples.rewards[group : group + settings.samples].mean()
            )
            own = slice(samples.rows.starts[row], samples.rows.starts[row + 1])
            tokens, marks = samples.rows.token_ids[own].long(), samples.rows.is_answer[own]
            every = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            log_probs = every.gather(1, tokens[1:, None])[:, 0][marks[1:]]
            for log_prob in log_probs:
                ratio = (log_prob - samples.sampled[at]).exp()
                clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
                gain = torch.minimum(ratio * advantage, clipped * advantage)
                away = samples.start[at] - log_prob
                distance = away.exp() - away - 1
                loss = loss + settings.beta * distance - gain
                figures["kl"] += distance.item()
                figures["entropy"] -= log_prob.item()
                figures["clipped"] += float(gain == clipped * advantage and ratio != clipped)
                at += 1
        loss = loss / (len(samples.rows) * settings.max_tokens)
        told.append({"loss": loss.item(), **{name: sum_ / at for name, sum_ in figures.items()}})
        optimizer.param_groups[0]["lr"] = learning_rate(settings, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(named.values(), settings.max_grad_norm)
        optimizer.step()
    return told, {name: tensor.detach() for name, tensor in named.items()}


def test_loss_and_adapter_are_those_of_the_formulas(tiny: Path) -> None:
    asked = policy_request()
    wanted, adapter = policy_by_the_formulas(tiny, asked)
    ours = train_policies(make_trainer(load(tiny)), [asked])[asked.run_id]
    assert len(ours.progress) == len(wanted) == 8
    for made, step in zip(ours.progress, wanted, strict=True):
        found = {"loss": made.loss, **made.rewards}
        for name, value in step.items():
            assert found[name] == pytest.approx(value, abs=1e-4), (made.step, name)
        assert 0 <= made.rewards["reward"] <= 1
    assert 0 < sum(each["clipped"] for each in wanted) < len(wanted)
    assert difference(ours.adapter, adapter) < 1e-4
    start = load_initial(tiny, asked)
    assert difference(ours.adapter, start) > 1e-3  # it has learned something that might differ


def load_initial(folder: Path, asked: RunRequest) -> dict[str, torch.Tensor]:
    model = peft_model(folder, asked.settings)
    return {
        name.replace(".default", ""): tensor.detach()
        for name, tensor in model.named_parameters()
        if tensor.requires_grad
    }


def test_an_answer_counts_the_same_however_long_it_is(tiny: Path) -> None:
    """Doubling the length that answers may have halves the loss; their own changes no weight."""
    losses = []
    for most in (9, 18):
        asked = policy_request(settings={"max_tokens": most, "steps": 1})
        losses.append(train_policies(make_trainer(load(tiny)), [asked])["rl"].losses[0])
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-6)


def test_equal_rewards_at_the_start_change_nothing(tiny: Path) -> None:
    asked = policy_request(settings={"steps": 1, "warmup_steps": 0})
    trainer = make_trainer(load(tiny))
    trainer.add(asked)
    (wanted,) = [e for e in trainer.step() if isinstance(e, SamplesWanted)]
    assert trainer.is_idle and wanted.examples == [0, 1]
    samples = answered(asked, wanted)
    same = dataclasses.replace(samples, rewards=torch.ones(6, dtype=torch.float64))
    probe = trainer.adapter(asked.run_id)
    assert difference(probe, load_initial(tiny, asked)) == 0
    trainer.give_samples(asked.run_id, same)
    results: dict[str, Result] = {}
    while trainer.has_work:
        note(results, trainer.step())
    made = results["rl"].progress[0]
    assert made.rewards["clipped"] == 0
    assert made.loss == pytest.approx(0.3 * made.rewards["kl"] * sum(samples.rows.num_answers) / 54)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sampled_answers_and_chats_in_one_batch_give_what_each_gives_alone(
    tiny: Path, dtype: torch.dtype
) -> None:
    model = load(tiny, dtype)
    held_out = HeldOut(rows=make_prompts(8, 3), every=4)
    asked = [
        policy_request("rl", held_out=held_out),
        request("sft", RunSettings(rank=8, steps=20, batch_size=2, learning_rate=3e-3)),
        policy_request("short", seed=6, settings={"steps": 2, "order": "group_by_length"}),
    ]
    together = train_policies(make_trainer(model), asked)
    bound = 1e-9 if dtype == torch.float64 else 1e-4
    for each in asked:
        alone = train_policies(make_trainer(model, runs_a_pass=1), [each])[each.run_id]
        shared = together[each.run_id]
        assert shared.losses == pytest.approx(alone.losses, abs=bound)
        assert difference(shared.adapter, alone.adapter) < bound
    validated = [each for each in together["rl"].progress if each.validation_loss is not None]
    assert [each.step for each in validated] == [4, 8]
    for made in validated:
        assert made.validation_loss == -made.rewards["validation_reward"]
    best = max(validated, key=lambda each: each.rewards["validation_reward"])
    assert validated[-1].best_step == best.step


@pytest.mark.parametrize("micro_batches", [0, 2, 4, 7])
def test_a_run_resumes_from_its_state_to_the_bit(tiny: Path, micro_batches: int) -> None:
    asked = policy_request(held_out=HeldOut(rows=make_prompts(8, 3), every=4))
    whole = train_policies(make_trainer(load(tiny)), [asked])[asked.run_id]
    first = make_trainer(load(tiny))
    first.add(asked)
    for _ in range(micro_batches + 1):
        for event in first.step():
            if isinstance(event, SamplesWanted):
                first.give_samples(asked.run_id, answered(asked, event))
    saved = first.checkpoint(asked.run_id)
    assert saved is not None
    second = make_trainer(load(tiny))
    after: dict[str, Result] = {}
    second.add(asked, saved)
    while second.has_work:
        events = second.step()
        note(after, events)
        for event in events:
            if isinstance(event, SamplesWanted):
                second.give_samples(asked.run_id, answered(asked, event))
    resumed = after[asked.run_id]
    assert resumed.progress == whole.progress[-len(resumed.progress) :]
    assert difference(resumed.adapter, whole.adapter) == 0


def test_rows_without_answers_are_only_for_sampling(tiny: Path) -> None:
    asked = dataclasses.replace(request("sft", RunSettings()), rows=make_prompts(1))
    with pytest.raises(RunRefused, match="row 0 has no answer to learn"):
        make_trainer(load(tiny)).add(asked)
