"""Calls against Tinker's formulas by autograd, alone and beside others; states come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.config import ModelConfig
from engine.primitives.losses import TokenLoss
from engine.primitives.trainer import Adam, CallTrainer, Pass, Passed
from engine.training.errors import RunRefused, RunTooLarge
from engine.training.memory import elements_of
from engine.training.run import RunSettings
from engine.training.trainer import TrainerConfig
from tests.engine.model.families import save_family
from tests.engine.training.scenes import VOCABULARY, difference, load, peft_model

SETTINGS = RunSettings(rank=4, alpha=8, seed=3)
LOSSES = (
    TokenLoss("cross_entropy"),
    TokenLoss("importance_sampling"),
    TokenLoss("ppo", low=0.9, high=1.1),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("calls") / "llama", "llama")


def make_trainer(folder: Path, **config: Any) -> CallTrainer:
    settings = {"token_budget": 48, "pool_elements": 1 << 20, **config}
    return CallTrainer(load(folder), TrainerConfig(**settings))


def make_pass(seed: int, loss: TokenLoss, *, is_forward: bool = False) -> Pass:
    """Seven rows whose targets are any tokens, not the rows' own next ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (7,), generator=generator).tolist()
    total = sum(lengths)
    return Pass(
        token_ids=torch.randint(0, VOCABULARY, (total,), generator=generator).int(),
        targets=torch.randint(0, VOCABULARY, (total,), generator=generator),
        weights=torch.randn(total, generator=generator),
        sampled=-5.5 + 0.3 * torch.randn(total, generator=generator),
        lengths=lengths,
        loss=loss,
        is_forward=is_forward,
    )


def run(trainer: CallTrainer, asked: dict[str, Pass]) -> dict[str, Passed]:
    for name, each in asked.items():
        trainer.begin(name, each)
    ended: dict[str, Passed] = {}
    while trainer.has_work:
        ended |= {passed.caller: passed for passed in trainer.step()}
        trainer.check_integrity()
    return ended


def by_the_formulas(model: Any, asked: Pass) -> tuple[torch.Tensor, torch.Tensor]:
    """-> log-probabilities and loss, as Tinker's documentation writes them"""
    rows, first = [], 0
    for length in asked.lengths:
        own = slice(first, first + length)
        every = model(asked.token_ids[own].long()[None]).logits[0].log_softmax(-1)
        rows.append(every.gather(1, asked.targets[own, None])[:, 0])
        first += length
    target_logprobs = torch.cat(rows)
    if asked.loss.name == "cross_entropy":
        return target_logprobs, (-target_logprobs * asked.weights).sum()
    prob_ratio = torch.exp(target_logprobs - asked.sampled)
    if asked.loss.name == "importance_sampling":
        return target_logprobs, -(prob_ratio * asked.weights).sum()
    clipped_ratio = torch.clamp(prob_ratio, asked.loss.low, asked.loss.high)
    objective = torch.min(prob_ratio * asked.weights, clipped_ratio * asked.weights)
    return target_logprobs, -objective.sum()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_losses_and_steps_are_those_of_the_formulas(tiny: Path, loss: TokenLoss) -> None:
    """Three steps, the second of two passes: gradients add up until the optimiser's step."""
    trainer = make_trainer(tiny)
    assert trainer.open("a", "acme", SETTINGS)
    model = peft_model(tiny, SETTINGS)
    named = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    optimiser = torch.optim.AdamW(
        named.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01
    )
    for seeds in ((1,), (2, 3), (4,)):
        for seed in seeds:
            asked = make_pass(seed, loss)
            logprobs, total = by_the_formulas(model, asked)
            total.backward()  # type: ignore[no-untyped-call]
            passed = run(trainer, {"a": asked})["a"]
            assert passed.loss == pytest.approx(total.item(), rel=1e-4, abs=1e-4)
            assert float((passed.logprobs - logprobs.detach()).abs().max()) < 1e-4
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
        optimiser.step()
        optimiser.zero_grad()
        made = trainer.optimise({"a": Adam(lr=3e-3, weight_decay=0.01, max_norm=0.5)})
        assert made["a"] == pytest.approx(float(norm), rel=1e-3)
    assert difference(trainer.adapter("a"), {n: p.detach() for n, p in named.items()}) < 1e-4


def test_a_forward_pass_adds_no_gradient(tiny: Path) -> None:
    trainer = make_trainer(tiny)
    trainer.open("a", "acme", SETTINGS)
    asked = make_pass(1, LOSSES[0], is_forward=True)
    passed = run(trainer, {"a": asked})["a"]
    assert "gradient" not in trainer.state("a").tensors
    again = run(trainer, {"a": make_pass(1, LOSSES[0])})["a"]
    assert torch.equal(passed.logprobs, again.logprobs)
    assert passed.loss == again.loss
    assert trainer.state("a").tensors["gradient"].any()


def test_callers_share_batches_and_change_nothing_of_each_other(tiny: Path) -> None:
    """In batches of all, and on a CPU, where each has its own, to the bit."""
    callers = {f"caller-{i}": (make_pass(i, LOSSES[i % 3]), i) for i in range(6)}

    def train(names: list[str], **config: Any) -> tuple[dict[str, Passed], dict[str, Any], int]:
        trainer, batches = make_trainer(tiny, token_budget=400, **config), 0
        for name in names:
            seed = callers[name][1]
            trainer.open(name, f"tenant-{seed % 2}", RunSettings(rank=seed + 1, seed=seed))
            trainer.begin(name, callers[name][0])
        ended: dict[str, Passed] = {}
        while trainer.has_work:
            ended |= {passed.caller: passed for passed in trainer.step()}
            batches += 1
        trainer.optimise({name: Adam(lr=1e-2) for name in names})
        return ended, {name: trainer.adapter(name) for name in names}, batches

    together, adapters, batches = train(list(callers))
    assert batches == 1
    ones, own, _ = train(list(callers), runs_a_pass=1)
    for name in callers:
        alone, adapter, _ = train([name], runs_a_pass=1)
        assert torch.equal(ones[name].logprobs, alone[name].logprobs)
        assert difference(own[name], adapter[name]) == 0
        assert together[name].loss == pytest.approx(alone[name].loss, rel=1e-5, abs=1e-4)
        assert difference(adapters[name], adapter[name]) < 1e-4


def test_a_state_goes_and_comes_back_to_the_bit(tiny: Path) -> None:
    """Between a pass and its step, with another caller in its place for a while."""
    room = elements_of(ModelConfig.from_folder(tiny), RunSettings(rank=8))
    kept, moved = make_trainer(tiny), make_trainer(tiny, pool_elements=room)
    for trainer in (kept, moved):
        assert trainer.open("a", "acme", SETTINGS)
        run(trainer, {"a": make_pass(1, LOSSES[0])})
        trainer.optimise({"a": Adam(lr=1e-2)})
        run(trainer, {"a": make_pass(2, LOSSES[0])})
    assert not moved.open("b", "globex", RunSettings(rank=8))
    state = moved.state("a")
    moved.close("a")
    assert moved.open("b", "globex", RunSettings(rank=8))
    run(moved, {"b": make_pass(3, LOSSES[1])})
    moved.close("b")
    assert moved.open("a", "acme", SETTINGS, state)
    for trainer in (kept, moved):
        trainer.optimise({"a": Adam(lr=1e-2)})
    assert difference(kept.adapter("a"), moved.adapter("a")) == 0
    moved.close("a")
    moved.check_integrity()


def test_a_gradient_that_is_not_finite_makes_no_step(tiny: Path) -> None:
    trainer = make_trainer(tiny)
    trainer.open("a", "acme", SETTINGS)
    before = trainer.adapter("a")
    asked = make_pass(1, LOSSES[0])
    asked.weights[3] = float("inf")
    run(trainer, {"a": asked})
    norm = trainer.optimise({"a": Adam(lr=1e-2)})["a"]
    assert not torch.isfinite(torch.tensor(norm))
    assert difference(before, trainer.adapter("a")) == 0
    assert "gradient" not in trainer.state("a").tensors
    assert trainer.state("a").steps == 0


def test_what_does_not_fit_is_refused(tiny: Path) -> None:
    room = elements_of(ModelConfig.from_folder(tiny), RunSettings(rank=8))
    trainer = make_trainer(tiny, pool_elements=room)
    with pytest.raises(RunTooLarge, match="there is room for"):
        trainer.open("a", "acme", RunSettings(rank=16))
    trainer.open("a", "acme", SETTINGS)
    asked = make_pass(1, LOSSES[0])
    asked.targets[5] = VOCABULARY
    with pytest.raises(RunRefused, match="outside the vocabulary") as refused:
        trainer.begin("a", asked)
    assert refused.value.param == "target_tokens"
    state = trainer.state("a")
    with pytest.raises(RunRefused, match="not that of this adapter"):
        trainer.open("b", "acme", RunSettings(rank=2), state)
    trainer.check_integrity()
