"""Trains an adapter's draft heads: `contract.adapters.draft_heads` says what they compute.

The LoRA is trained by then and stays as it is. The states that the heads read are computed with it,
without gradients; the losses are those of the answers' tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from contract.adapters.draft_heads import head_names
from contract.training.job import JobError
from engine.training.model import TrainingModel
from engine.training.packer import Piece, cut_step, pack
from engine.training.parameters import AdapterLayout, Span
from engine.training.run import RunRequest, RunRows
from engine.training.tables import SiteTables
from kernels.training import Pools

#: Label of a token without a loss; cross-entropy skips this value.
IGNORED = -100
#: A head's rank, where the base is as wide as that.
RANK = 32
LEARNING_RATE = 3e-3
#: Passes over the rows that the LoRA was trained on, and the fewest steps, however few those are.
NUM_PASSES, LEAST_STEPS = 3, 100
#: Logits that are computed at once.
_MAX_LOGITS = 1 << 24
#: Batches that the heads' accuracy is counted on.
_MAX_COUNTED = 32
#: Steps between two events.
_EVERY = 10


class Heads(torch.nn.Module):
    """The heads of one adapter, all of one rank.

    `up` is zero at first: an untrained head guesses what the LM head says of x itself.
    """

    def __init__(self, num_heads: int, hidden: int, *, seed: int) -> None:
        super().__init__()
        rank = min(RANK, hidden)
        drawn = torch.Generator().manual_seed(seed)
        down = torch.randn(num_heads, rank, hidden, generator=drawn) / math.sqrt(hidden)
        self.down = torch.nn.Parameter(down)  # [H, R, E]
        self.up = torch.nn.Parameter(torch.zeros(num_heads, hidden, rank))  # [H, E, R]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the LM head is to read, [H, N, E], of states x [N, E] in float32."""
        inner = torch.einsum("ne,hre->hnr", x, self.down)
        return x + F.silu(torch.einsum("hnr,her->hne", inner, self.up))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return them as the adapter's file has them."""
        named = {}
        for index in range(len(self.down)):
            down, up = head_names(index)
            named[down] = self.down[index].detach().cpu().clone()
            named[up] = self.up[index].detach().cpu().clone()
        return named


@dataclass(frozen=True, slots=True)
class States:
    """The inputs of the heads, and the tokens that they are to guess.

    x        [N, E] float32, where the next token is one of an answer
    targets  [N, H]; IGNORED where the answer is over before
    """

    x: torch.Tensor
    targets: torch.Tensor


def targets_of(labels: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the heads read, [S, T], and what each is to guess there, [S, T, H].

    labels  [S, T], IGNORED outside of answers
    At place t, head i guesses the token at t + i + 2, if all from t + 1 on are of one answer.
    """
    ahead = [labels]
    for _ in range(num_heads + 1):
        ahead.append(F.pad(ahead[-1][:, 1:], (0, 1), value=IGNORED))
    is_answer = ahead[1] != IGNORED
    reads, found = is_answer, []
    for later in ahead[2:]:
        is_answer = is_answer & (later != IGNORED)
        found.append(torch.where(is_answer, later, IGNORED))
    return reads, torch.stack(found, -1)


class HeadTraining:
    """Trains heads over an adapter that stays as it is, a pass through the model at a time.

    rows, validation  that the LoRA was trained on and validated with; None: it was not validated
    """

    def __init__(
        self,
        model: TrainingModel,
        *,
        request: RunRequest,
        adapter: Mapping[str, torch.Tensor],
        token_budget: int,
    ) -> None:
        self._model, self._budget, self._settings = model, token_budget, request.settings
        self._rows = request.rows
        self._validation = None if request.held_out is None else request.held_out.rows
        layout = AdapterLayout(model.config, request.settings)
        values = torch.zeros(layout.size, dtype=model.dtype, device=model.device)
        layout.fill(values, 0, adapter)
        self._pools = Pools(values, values, values, values, values)  # `values` alone is read
        self._sites = SiteTables(model.config, model.device).of([(layout, Span(0, layout.size))])
        self.tensors: dict[str, torch.Tensor] = {}

    def run(self, num_heads: int, num_steps: int) -> Iterator[dict[str, Any]]:
        """Train; `tensors` has the heads in the end. Yields after each pass: what is new to tell.

        num_steps  that the LoRA was trained: a short training of many rows has few for heads
        That is `draft_head_step`, `draft_head_steps`, `draft_head_loss`, and in the end
        `draft_head_accuracy`, the share of right guesses of each head, `…_untrained`, and which
        rows they were counted on. Raises JobError.
        """
        settings, rows = self._settings, self._rows
        heads = Heads(num_heads, self._model.config.hidden_size, seed=settings.seed)
        heads.to(self._model.device)
        counted = rows if self._validation is None else self._validation
        before = yield from self._accuracy(heads, counted)
        num_batches = num_steps * settings.gradient_accumulation
        steps = NUM_PASSES * min(num_batches, -(-len(rows) // settings.batch_size))
        loss = yield from self._train(heads, max(steps, LEAST_STEPS))
        after = yield from self._accuracy(heads, counted)
        self.tensors = heads.tensors()
        yield {
            "draft_head_loss": loss,
            "draft_head_accuracy": after,
            "draft_head_accuracy_untrained": before,
            "draft_head_accuracy_on": "training" if counted is rows else "validation",
        }

    def _train(self, heads: Heads, steps: int) -> Generator[dict[str, Any], None, float]:
        """-> the mean loss of a head over the last tenth of the steps."""
        optimizer = torch.optim.AdamW(heads.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
        drawn = torch.Generator().manual_seed(self._settings.seed)
        batches, losses = self._by_length(self._rows), list[float]()
        order: list[int] = []
        while len(losses) < steps:
            order = order or torch.randperm(len(batches), generator=drawn).tolist()
            states = self._states(self._rows, batches[order.pop()], len(heads.down))
            losses.append(self._step(heads, states))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            told: dict[str, Any] = {}
            if len(losses) % _EVERY == 0 or len(losses) == steps:
                told = {"draft_head_step": len(losses), "draft_head_steps": steps}
                told["draft_head_loss"] = round(losses[-1], 4)
            yield told
        last = losses[-max(1, steps // 10) :]
        return round(sum(last) / len(last), 4)

    def _step(self, heads: Heads, states: States) -> float:
        """Compute the gradients of a batch; return the mean loss of a head.

        In pieces, so that the logits of a long batch need no more memory than those of a short one.
        """
        counts = (states.targets != IGNORED).sum(0)  # [H]
        total = 0.0
        for x, targets in self._pieces(states):
            losses = F.cross_entropy(
                self._model.logits(heads(x)).flatten(0, 1).float(),
                targets.T.flatten(),
                ignore_index=IGNORED,
                reduction="none",
            ).view(len(counts), -1)
            # Each head's mean over its own tokens; a head that has none has no loss.
            loss = (losses.sum(1) / counts.clamp(min=1)).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if not math.isfinite(total):
            raise JobError("hyperparameters.draft_heads", "their loss became infinite or NaN")
        return total / max(1, int((counts > 0).sum()))

    def _accuracy(
        self, heads: Heads, rows: RunRows
    ) -> Generator[dict[str, Any], None, list[float]]:
        """-> the share of each head's guesses that are right, on some of the rows."""
        num_heads = len(heads.down)
        right, count = torch.zeros(num_heads), torch.zeros(num_heads)
        batches = self._by_length(rows)
        stride = -(-len(batches) // _MAX_COUNTED)
        for indices in batches[::stride]:
            with torch.no_grad():
                for x, targets in self._pieces(self._states(rows, indices, num_heads)):
                    guesses = self._model.logits(heads(x)).argmax(-1).T  # [N, H]
                    right += (guesses == targets).sum(0).cpu()
                    count += (targets != IGNORED).sum(0).cpu()
            yield {}
        return [round(float(share), 4) for share in right / count.clamp(min=1)]

    def _by_length(self, rows: RunRows) -> list[list[int]]:
        """Return the rows in batches; those of similar length share one."""
        order, size = (
            sorted(range(len(rows)), key=rows.lengths.__getitem__),
            self._settings.batch_size,
        )
        return [order[at : at + size] for at in range(0, len(order), size)]

    def _states(self, rows: RunRows, indices: list[int], num_heads: int) -> States:
        """Compute what the heads read in some rows."""
        found, first = [], 0
        for number in cut_step([rows.lengths[index] for index in indices], self._budget):
            batch = pack([Piece(rows, indices[first : first + number], 1.0)], self._model.device)
            found.append(self._model.states(batch, self._sites, self._pools).float())
            first += number
        labels = _labels(rows, indices)
        reads, targets = targets_of(labels, num_heads)
        return States(x=torch.cat(found), targets=targets[reads].to(self._model.device))

    def _pieces(self, states: States) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the states and targets in pieces whose logits are few enough."""
        size = max(1, _MAX_LOGITS // (self._model.config.vocab_size * states.targets.shape[1]))
        for at in range(0, len(states.x), size):
            yield states.x[at : at + size], states.targets[at : at + size]


def _labels(rows: RunRows, indices: list[int]) -> torch.Tensor:
    """Return the rows' answer tokens [S, T], IGNORED elsewhere."""
    labels = torch.full((len(indices), max(rows.lengths[index] for index in indices)), IGNORED)
    for number, index in enumerate(indices):
        own = slice(rows.starts[index], rows.starts[index + 1])
        answer = rows.token_ids[own].long().where(rows.is_answer[own], IGNORED)
        labels[number, : rows.lengths[index]] = answer
    return labels


def _rate(step: int, steps: int) -> float:
    """Return a step's part of the learning rate: a tenth of the steps warm up, then a cosine."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
