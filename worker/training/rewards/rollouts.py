"""Rollouts: takes runs of rewards from one step to the next, beside other runs' micro-batches.

    SamplesWanted -> sampled -> written for the graders, rewards read -> the step's rows
                             -> scored under the run's start          ->

Start reading at `Rollouts.step`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from contract.training.rewards import (
    Answer,
    Asked,
    BadRewards,
    Rewards,
    take_rewards,
    write_answers,
)
from engine.errors import EngineError
from engine.text.codec import TextCodec
from engine.text.thoughts import Part
from engine.training.events import SamplesWanted
from engine.training.policy import Samples
from engine.training.run import RunRows
from engine.training.trainer import BatchTrainer
from worker.training.jobs import PreparedJob
from worker.training.rewards.sampler import Ended, Sampled, Sampler

#: Seconds between two looks for rewards, while there is nothing else to do.
_WAIT_S = 0.01


@dataclass(slots=True)
class _Rollout:
    """One run's step.

    prompts  the tokens of each, whose line in the dataset is in `lines`
    answers  by prompt, once they are whole; `scores`, of each answer in order, under the start
    asked    what the graders were asked
    """

    prepared: PreparedJob
    wanted: SamplesWanted
    digest: str
    prompts: list[list[int]]
    lines: list[int]
    answers: dict[int, list[Sampled]] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    asked: Asked | None = None
    rewards: Rewards | None = None

    @property
    def flat(self) -> list[tuple[list[int], Sampled]]:
        """Each answer behind its prompt, group after group."""
        places = range(len(self.prompts))
        return [(self.prompts[at], answer) for at in places for answer in self.answers[at]]

    @property
    def is_whole(self) -> bool:
        if self.rewards is None:
            return False
        return self.wanted.is_validation or len(self.scores) == len(self.rewards.rewards)


class Rollouts:
    """The steps of the runs that wait for samples; one thread uses it.

    emit  tells whoever grades that answers are written
    """

    def __init__(self, trainer: BatchTrainer, sampler: Sampler, codec: TextCodec) -> None:
        self._trainer, self._sampler, self._codec = trainer, sampler, codec
        self._rollouts: dict[str, _Rollout] = {}
        self._starts: dict[str, str] = {}
        self.emit: Callable[..., None] = lambda *_, **__: None

    def want(self, prepared: PreparedJob, wanted: SamplesWanted) -> None:
        """Begin to sample what a run wants, under the adapter that it has now."""
        name, request = wanted.run_id, prepared.request
        settings = request.settings
        rows, lines = request.rows, prepared.lines
        if wanted.is_validation:
            assert request.held_out is not None
            rows, lines = request.held_out.rows, prepared.validation_lines
        prompts = [
            rows.token_ids[rows.starts[example] : rows.starts[example + 1]].tolist()
            for example in wanted.examples
        ]
        own = [lines[example] for example in wanted.examples]
        if request.adapter is not None and name not in self._starts:
            self._starts[name] = self._sampler.load(request.adapter, settings)
        digest = self._sampler.load(self._trainer.adapter(name), settings)
        self._rollouts[name] = _Rollout(prepared, wanted, digest, prompts, own)
        assert settings.samples is not None and settings.max_tokens is not None
        for at, prompt in enumerate(prompts):
            seed = None if wanted.is_validation else _seed(settings.seed, wanted, at)
            count = 1 if wanted.is_validation else settings.samples
            self._sampler.sample(
                name,
                at,
                prompt,
                digest=digest,
                count=count,
                seed=seed,
                max_tokens=settings.max_tokens,
            )

    def step(self, *, may_wait: bool) -> list[tuple[str, str]]:
        """Make a step of the engine, and give the trainer the steps that are whole.

        may_wait  for rewards, because there is nothing else to do
        -> runs that cannot continue, and why
        """
        failed: list[tuple[str, str]] = []
        is_busy = self._sampler.has_work
        for ended in self._sampler.step() if is_busy else ():
            try:
                self._note(ended)
            except EngineError as error:
                failed.append((ended.owner, f"its answers cannot be sampled: {error.message}"))
        for name, rollout in list(self._rollouts.items()):
            try:
                self._take_rewards(rollout)
            except (BadRewards, OSError) as error:
                failed.append((name, f"its rewards cannot be read: {error}"))
            if rollout.is_whole:
                is_busy = True
                self._give(name, rollout)
        if may_wait and not is_busy:
            time.sleep(_WAIT_S)
        return failed

    def drop(self, name: str) -> None:
        """Forget a run that has ended."""
        self._sampler.drop(name)
        rollout, start = self._rollouts.pop(name, None), self._starts.pop(name, None)
        if rollout is not None:
            self._sampler.unload(rollout.digest)
        if start is not None:
            self._sampler.unload(start)

    def close(self) -> None:
        self._sampler.close()

    def _note(self, ended: Ended) -> None:
        """Note a prompt's answers, or an answer's scores. Raises EngineError."""
        rollout = self._rollouts[ended.owner]
        if ended.error is not None:
            raise ended.error
        if ended.scores is not None:
            rollout.scores[ended.key] = ended.scores
            return
        rollout.answers[ended.key] = ended.answers
        if len(rollout.answers) == len(rollout.prompts):
            self._have_graded(ended.owner, rollout)

    def _have_graded(self, name: str, rollout: _Rollout) -> None:
        """Write the answers for the graders, and have them scored under the run's start."""
        wanted, job = rollout.wanted, rollout.prepared.named.job
        assert job.rewards_dir is not None
        group = len(rollout.answers[0])
        answers = [
            Answer(rollout.lines[at], self._text(rollout.prompts[at], answer), answer.is_cut)
            for at in range(len(rollout.prompts))
            for answer in rollout.answers[at]
        ]
        rollout.asked = Asked(wanted.step, group, answers, wanted.is_validation)
        path = write_answers(job.rewards_dir, rollout.asked)
        self.emit(name, "answers", step=wanted.step, file=path.name)
        if not wanted.is_validation:
            for place, (prompt, answer) in enumerate(rollout.flat):
                self._sampler.score(name, place, prompt + answer.token_ids, self._starts.get(name))

    def _text(self, prompt: list[int], answer: Sampled) -> str:
        """Return what a client would get as the content: the answer without its thought."""
        token_ids, thoughts = answer.text_ids, self._codec.thoughts
        if thoughts is not None:
            reader = thoughts.reader(prompt)
            token_ids = [each for each in token_ids if reader.read(each) is Part.TEXT]
        return self._codec.decode_whole(token_ids).strip()

    def _take_rewards(self, rollout: _Rollout) -> None:
        folder = rollout.prepared.named.job.rewards_dir
        if rollout.asked is not None and rollout.rewards is None and folder is not None:
            rollout.rewards = take_rewards(folder, rollout.asked)

    def _give(self, name: str, rollout: _Rollout) -> None:
        del self._rollouts[name]
        self._sampler.unload(rollout.digest)
        self._trainer.give_samples(name, _samples(rollout))


def _samples(rollout: _Rollout) -> Samples:
    """Return a whole rollout as the trainer takes it."""
    assert rollout.rewards is not None
    flat = rollout.flat
    rewards = torch.tensor(rollout.rewards.rewards, dtype=torch.float64)
    lengths = [len(answer.token_ids) for _, answer in flat]
    # Nothing is scored under the start for validation.
    starts = [rollout.scores[place][-lengths[place] :] for place in sorted(rollout.scores)]
    groups = rewards.view(len(rollout.prompts), -1)
    figures = {
        "reward": float(rewards.mean()),
        "answer_tokens": sum(lengths) / len(lengths),
        "cut_answers": sum(answer.is_cut for _, answer in flat) / len(flat),
        **rollout.rewards.figures,
    }
    if not rollout.wanted.is_validation:
        figures["reward_spread"] = float(groups.std(1, unbiased=False).mean())
    return Samples(
        rows=RunRows.of(
            (
                prompt + answer.token_ids,
                [False] * len(prompt) + [True] * len(answer.token_ids),
            )
            for prompt, answer in flat
        ),
        rewards=rewards,
        sampled=torch.tensor([each for _, answer in flat for each in answer.logprobs]).double(),
        start=torch.tensor([each for own in starts for each in own], dtype=torch.float64),
        figures=figures,
    )


def _seed(seed: int, wanted: SamplesWanted, place: int) -> int:
    """Return the seed of a prompt's answers: a function of the run's seed and the step alone."""
    text = f"{seed} {wanted.step} {place}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1
