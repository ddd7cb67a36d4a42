"""CaseJudge: scores expected answers under a run's new adapter and the live one, in the batch.

The same tokens are scored as `controlplane.evaluations.asking` asks serving workers for: the chat
template's after the prompt, up to the one that ends the turn, each given all before it.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from contract.adapters import peft_config, safetensors_header
from contract.adapters.problems import AdapterProblems
from contract.messages.protocol import adapter_digest_of
from contract.training.job import JobError, TrainJob
from contract.training.judging import (
    LEAST_LOGPROB,
    MOST_S,
    MOST_WAIT_S,
    BadJudgingFile,
    BatchScores,
    Cases,
    ExpectedAnswer,
    Score,
    read_cases,
    write_scores,
)
from engine.text.chat_rendering import render_chat
from engine.text.chat_template import PromptError
from engine.text.codec import TextCodec
from engine.training.errors import TrainingError
from engine.training.held_out import HeldOutLoss, Judged, held_out_passes
from engine.training.model import TrainingModel
from engine.training.parameters import AdapterLayout
from engine.training.run import LINEARS, RunRows, RunSettings
from worker.training.jobs import NamedJob, settings_of
from worker.training.warm_start import read_warm_start

_NEW, _LIVE = "new", "live"


class NotScored(Exception):
    """The cases cannot be scored here; the message is for the run's owner."""


@dataclass(frozen=True, slots=True)
class RunScores:
    """The scores of a run's cases, before its adapter is written.

    found  by the adapter, `_NEW` or `_LIVE`: a score of each case; or why there are none
    """

    name: str
    cases: Cases | None
    found: dict[str, tuple[Score, ...]] | str

    def write(self, folder: Path) -> None:
        """Write the scores beside the adapter whose files are in the folder."""
        if isinstance(self.found, str) or self.cases is None:
            write_scores(folder, str(self.found))
            return
        scores = BatchScores(
            given=self.cases.given,
            digest=_digest(folder, self.cases.given.base_revision),
            cases_sha256=self.cases.sha256,
            candidate=self.found[_NEW],
            live=self.found[_LIVE],
        )
        write_scores(folder, scores)


@dataclass(frozen=True, slots=True)
class _Work:
    """One run's cases as rows.

    row_of  the row of each case; None: nothing of it is scored
    """

    cases: Cases
    rows: RunRows
    row_of: list[int | None]
    passes: Iterator[list[HeldOutLoss]]


class CaseJudge:
    """Scores runs that have ended, one after the other, a pass at a time between others' steps.

    Another thread reads the cases. What goes wrong here fails no run: it is said why there are no
    scores.
    """

    def __init__(self, model: TrainingModel, codec: TextCodec, token_budget: int) -> None:
        self._model, self._codec, self._budget = model, codec, token_budget
        self._reader = ThreadPoolExecutor(1, "cases")
        self._waiting: deque[tuple[str, Future[_Work], float]] = deque()
        self._found: dict[str, torch.Tensor] = {}
        self._used_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, named: NamedJob, adapter: Mapping[str, torch.Tensor]) -> None:
        """Have a run's cases scored under its adapter, and under the one that is live."""
        read = self._reader.submit(self._read, named.job, adapter)
        self._waiting.append((named.name, read, time.monotonic()))

    def drop(self, name: str) -> None:
        """Forget a run."""
        if self._waiting and self._waiting[0][0] == name:
            self._begin_anew()
        self._waiting = deque(each for each in self._waiting if each[0] != name)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def step(self, *, may_wait: bool) -> RunScores | None:
        """Make one pass. -> the scores of the run that it ended.

        may_wait  for cases that are still read, because there is nothing else to do
        """
        if not self._waiting:
            return None
        name, read, added = self._waiting[0]
        if not (may_wait or read.done()):
            return None
        cases: Cases | None = None
        found: dict[str, tuple[Score, ...]] | str | None
        try:
            work = read.result()
            cases = work.cases
            found = self._pass(work, time.monotonic() - added)
        except (NotScored, BadJudgingFile, JobError, TrainingError, OSError) as error:
            found = str(error)
        except torch.OutOfMemoryError:
            found = "there was no memory for it"
        except Exception:
            traceback.print_exc()  # a defect of ours, which is no reason to fail a run
            found = "it failed; the trainer's log says why"
        if found is None:
            return None
        self._waiting.popleft()
        self._begin_anew()
        return RunScores(name, cases, found)

    def _pass(self, work: _Work, waited_s: float) -> dict[str, tuple[Score, ...]] | None:
        """Make a pass. -> all scores, once there are. Raises NotScored, TrainingError."""
        if not self._used_s and waited_s > MOST_WAIT_S:
            raise NotScored(f"other runs' cases took {MOST_WAIT_S:g} s")
        if self._used_s > MOST_S:
            raise NotScored(f"it would have taken more than {MOST_S:g} s")
        began = time.monotonic()
        ended = next(work.passes)
        self._used_s += time.monotonic() - began
        self._found |= {each.name: each.token_losses for each in ended}
        if self._found.keys() != {_NEW, _LIVE}:
            return None
        return {name: _scores(work, losses) for name, losses in self._found.items()}

    def _begin_anew(self) -> None:
        self._found, self._used_s = {}, 0.0

    def _read(self, job: TrainJob, adapter: Mapping[str, torch.Tensor]) -> _Work:
        """Read a run's cases and the live adapter. Raises what `step` catches."""
        assert job.judge_dir is not None
        cases = read_cases(job.judge_dir)
        tokens: list[tuple[list[int], list[bool]]] = []
        row_of: list[int | None] = []
        for number, answer in enumerate(cases.answers):
            token_ids, first = answer_tokens(self._codec, answer, number)
            row_of.append(len(tokens) if first < len(token_ids) else None)
            if first < len(token_ids):
                tokens.append((token_ids, [at >= first for at in range(len(token_ids))]))
        if not tokens:
            raise NotScored("no case has an expected answer with tokens")
        live_settings = _settings(job.judge_dir / peft_config.FILE)
        layout = AdapterLayout(self._model.config, live_settings)
        try:
            live = read_warm_start(job.judge_dir / safetensors_header.FILE, layout)
        except JobError as error:
            raise NotScored(f"of the live version, {error.problem}") from error
        rows, settings = RunRows.of(tokens), settings_of(job.hyperparameters)
        size = layout.size + AdapterLayout(self._model.config, settings).size
        judged = (
            Judged(name=_NEW, rows=rows, settings=settings, adapter=adapter),
            Judged(name=_LIVE, rows=rows, settings=live_settings, adapter=live),
        )
        budget, model = self._budget, self._model
        passes = held_out_passes(model, judged, token_budget=budget, pool_elements=size)
        return _Work(cases, rows, row_of, passes)


def answer_tokens(
    codec: TextCodec, answer: ExpectedAnswer, number: int = 0
) -> tuple[list[int], int]:
    """Return a case's tokens to the end of the turn, and the first of the expected answer.

    That is their number, or more, if nothing is scored. Raises NotScored.
    """
    last = {"role": "assistant", "content": answer.expected}
    try:
        prompt = codec.encode_chat(render_chat(codec, answer.messages))
        whole = codec.encode_chat(
            render_chat(codec, [*answer.messages, last], generation_prompt=False)
        )
    except (PromptError, KeyError, TypeError, ValueError) as error:
        raise NotScored(f"case {number + 1} cannot be rendered: {error}") from error
    if len(whole) >= codec.context_length:  # a worker needs room for one token more
        raise NotScored(f"case {number + 1} has {len(whole)} tokens, too many for the context")
    first = _common(prompt, whole)
    if first == 0:
        return whole, len(whole)
    return whole[: _turn_end(codec, whole)], first


def _common(one: list[int], other: list[int]) -> int:
    """Return how many tokens two prompts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _turn_end(codec: TextCodec, token_ids: list[int]) -> int:
    """Return the number of tokens up to the one that ends the turn: templates write blanks behind.

    As `controlplane.evaluations.asking.turn_end`, of what a worker tells of its tokens.
    """
    end = len(token_ids)
    while end:
        piece = codec.pieces.of(token_ids[end - 1], is_first=False)
        if not piece.bytes or piece.text.strip():
            return end
        end -= 1
    return end


def _settings(path: Path) -> RunSettings:
    """Return the live adapter's settings. Raises NotScored for what the batch does not compute."""
    try:
        raw = peft_config.load_json(path.read_bytes(), peft_config.ENGINE_LIMITS.max_bytes)
        config = peft_config.read_config(raw, peft_config.ENGINE_LIMITS)
    except AdapterProblems as error:
        raise NotScored(f"the live version's config cannot be read: {error}") from error
    every = raw.get("target_modules") == "all-linear"
    targets = LINEARS if every else config.target_names
    plain = {
        "use_dora": not config.use_dora,
        "lora_bias": not config.lora_bias,
        "bias": config.bias == "none",
        "target_modules": bool(targets) and set(targets) <= set(LINEARS),
        "exclude_modules": not config.exclude_modules,
        "layers_to_transform": config.layers is None,
        "rank_pattern": not config.rank_pattern,
        "alpha_pattern": not config.alpha_pattern,
        "modules_to_save": not config.saved,
        "trainable_token_indices": not config.token_ids,
        "target_parameters": not config.target_parameters,
    }
    for name, is_plain in plain.items():
        if not is_plain:
            raise NotScored(f"the batch does not compute the live version's {name}")
    return RunSettings(
        rank=config.rank,
        alpha=config.alpha,
        use_rslora=config.use_rslora,
        target_modules=tuple(targets),
    )


def _scores(work: _Work, losses: torch.Tensor) -> tuple[Score, ...]:
    """Return each case's log-probability and its tokens. Raises NotScored if one overflowed."""
    if bool(losses.isnan().any()):
        raise NotScored("a log-probability is no number")
    values = (-losses.double()).clamp(min=LEAST_LOGPROB, max=0.0)
    sums = [round(float(part.sum()), 6) for part in torch.split(values, work.rows.num_answers)]
    return tuple(
        (None, 0) if row is None else (sums[row], work.rows.num_answers[row]) for row in work.row_of
    )


def _digest(folder: Path, base_revision: str) -> str:
    """Return the digest that the platform will give the adapter in a folder."""
    config = (folder / peft_config.FILE).read_bytes()
    with (folder / safetensors_header.FILE).open("rb") as file:
        tensors_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    raw = peft_config.load_json(config, peft_config.ENGINE_LIMITS.max_bytes)
    return adapter_digest_of(raw, tensors_sha256, base_revision)
