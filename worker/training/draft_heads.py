"""Trains an adapter's draft heads: `contract.draft_heads` says what they compute.

The LoRA is trained by then and stays as it is. The states that the heads read are computed with it,
without gradients; the losses are those of the answers' tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from contract.draft_heads import head_names
from contract.safetensors_header import FILE
from contract.training import Hyperparameters, JobError
from worker.training.batches import collate
from worker.training.chat_data import Examples
from worker.training.checkpoints import Checkpoints, TrainingStopped
from worker.training.example_store import IGNORED, ExampleStore

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
    """What the heads read, and what they are to guess.

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


def save_adapter(model: Any, heads: dict[str, torch.Tensor], folder: Path) -> None:
    """Write PEFT's two files, and the heads beside the LoRA."""
    model.save_pretrained(folder)
    if heads:
        tensors = {**load_file(folder / FILE), **heads}
        save_file(tensors, folder / FILE, metadata={"format": "pt"})


def train_heads(
    trainer: Any,
    checkpoints: Checkpoints,
    data: Examples,
    hyper: Hyperparameters,
    emit: Callable[..., None],
    told: dict[str, Any],
    *,
    pad_id: int,
) -> dict[str, torch.Tensor]:
    """Return heads for a Trainer's model, whose LoRA is the result's and is saved before.

    told  the last progress, which the events repeat
    Raises TrainingStopped.
    """
    found = checkpoints.found
    if found is not None and found.is_final:
        told = found.state["told"]
    else:
        checkpoints.save_final(trainer.state, trainer.model, told)
    training = HeadTraining(
        trainer.model,
        pad_id=pad_id,
        batch_size=hyper.batch_size,
        tell=lambda **fields: emit("draft_heads", **told, **fields),
        is_stopped=lambda: checkpoints.is_to_stop,
    )
    return training.run(
        hyper.draft_heads,
        data.examples,
        data.validation,
        num_batches=trainer.state.global_step * hyper.gradient_accumulation,
        seed=hyper.seed,
    )


class HeadTraining:
    """Trains the heads of a PEFT model.

    tell        gets how far it is: `draft_head_step`, `draft_head_steps`, `draft_head_loss`, and in
                the end `draft_head_accuracy`, the share of right guesses of each head,
                `draft_head_accuracy_untrained`, and which rows they were counted on
    is_stopped  asked before each piece of work
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        batch_size: int,
        tell: Callable[..., None],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._base = model.get_base_model()
        self._pad_id, self._batch_size = pad_id, batch_size
        self._tell, self._is_stopped = tell, is_stopped
        self._device = next(model.parameters()).device
        model.eval()

    def run(
        self,
        num_heads: int,
        rows: ExampleStore,
        validation: ExampleStore,
        *,
        num_batches: int,
        seed: int,
    ) -> dict[str, torch.Tensor]:
        """Return the trained heads. Raises TrainingStopped.

        num_batches  that the LoRA was trained on: a short training of many rows has few for heads
        """
        hidden = self._base.get_output_embeddings().weight.shape[1]
        heads = Heads(num_heads, hidden, seed=seed).to(self._device)
        counted = validation if len(validation) else rows
        before = self._accuracy(heads, counted)
        steps = NUM_PASSES * min(num_batches, -(-len(rows) // self._batch_size))
        loss = self._train(heads, rows, max(steps, LEAST_STEPS), seed)
        self._tell(
            draft_head_loss=loss,
            draft_head_accuracy=self._accuracy(heads, counted),
            draft_head_accuracy_untrained=before,
            draft_head_accuracy_on="validation" if counted is validation else "training",
        )
        return heads.tensors()

    def _train(self, heads: Heads, rows: ExampleStore, steps: int, seed: int) -> float:
        """Train; return the mean loss of a head over the last tenth of the steps."""
        optimizer = torch.optim.AdamW(heads.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
        drawn = torch.Generator().manual_seed(seed)
        batches, losses = self._by_length(rows), list[float]()
        order: list[int] = []
        while len(losses) < steps:
            order = order or torch.randperm(len(batches), generator=drawn).tolist()
            states = self._states(rows, batches[order.pop()], len(heads.down))
            losses.append(self._step(heads, states))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if len(losses) % _EVERY == 0 or len(losses) == steps:
                told = {"draft_head_step": len(losses), "draft_head_steps": steps}
                self._tell(**told, draft_head_loss=round(losses[-1], 4))
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
                self._logits(heads, x).flatten(0, 1).float(),
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

    @torch.no_grad()
    def _accuracy(self, heads: Heads, rows: ExampleStore) -> list[float]:
        """Return the share of each head's guesses that are right, on some of the rows."""
        num_heads = len(heads.down)
        right, count = torch.zeros(num_heads), torch.zeros(num_heads)
        batches = self._by_length(rows)
        stride = -(-len(batches) // _MAX_COUNTED)
        for indices in batches[::stride]:
            for x, targets in self._pieces(self._states(rows, indices, num_heads)):
                guesses = self._logits(heads, x).argmax(-1).T  # [N, H]
                right += (guesses == targets).sum(0).cpu()
                count += (targets != IGNORED).sum(0).cpu()
        return [round(float(share), 4) for share in right / count.clamp(min=1)]

    def _by_length(self, rows: ExampleStore) -> list[list[int]]:
        """Return the rows in batches; those of similar length share one, which pads little."""
        order = sorted(range(len(rows)), key=rows.length)
        return [order[at : at + self._batch_size] for at in range(0, len(order), self._batch_size)]

    @torch.no_grad()
    def _states(self, rows: ExampleStore, indices: list[int], num_heads: int) -> States:
        """Compute what the heads read in some rows, as the loop computes it."""
        if self._is_stopped():
            raise TrainingStopped
        batch = collate([rows[index].as_input() for index in indices], self._pad_id)
        batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
        reads, targets = targets_of(batch["labels"], num_heads)
        with self._autocast():
            hidden = self._base.get_decoder()(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                use_cache=False,
            ).last_hidden_state
        return States(x=hidden[reads].float(), targets=targets[reads])

    def _pieces(self, states: States) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the states and targets in pieces whose logits are few enough."""
        vocab_size = self._base.get_output_embeddings().weight.shape[0]
        size = max(1, _MAX_LOGITS // (vocab_size * states.targets.shape[1]))
        for at in range(0, len(states.x), size):
            if self._is_stopped():
                raise TrainingStopped
            yield states.x[at : at + size], states.targets[at : at + size]

    def _logits(self, heads: Heads, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each head, [H, N, V]. The LM head has no gradient of its own."""
        read = heads(x)
        with self._autocast():
            logits: torch.Tensor = self._base.get_output_embeddings()(read)
        return logits

    def _autocast(self) -> Any:
        dtype = self._base.dtype
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype != torch.float32)


def _rate(step: int, steps: int) -> float:
    """Return a step's part of the learning rate: a tenth of the steps warm up, then a cosine."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
