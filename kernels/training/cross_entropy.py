"""The loss of answer tokens, from the last layer's output; logits exist for a chunk at a time.

The gradient is computed beside the loss, so that logits are never computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.backend import jit, next_power_of_2, tl, use_triton
from kernels.training.norms import Norm, widen

#: Answer tokens whose logits exist at a time: 1 GB in bf16 at 128 k words.
CHUNK = 4096


#: Stands for the logit of a word that there is not.
_LOW = -1e30


def loss_and_gradient_torch(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """logits [N, V] -> the loss of each [N]; logits become weights * their gradient, in place."""
    wide = widen(logits)
    log_sum = torch.logsumexp(wide, dim=-1)
    losses = log_sum - wide.gather(1, targets[:, None])[:, 0]
    gradient = torch.exp(wide - log_sum[:, None])
    gradient.scatter_add_(1, targets[:, None], -torch.ones_like(targets, dtype=wide.dtype)[:, None])
    logits.copy_(gradient * weights.to(wide.dtype)[:, None])
    return losses


@jit("vocabulary")
def _loss_kernel(
    logits_ptr, targets_ptr, weights_ptr, losses_ptr, vocabulary, LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * vocabulary
    lane = tl.arange(0, BLOCK)
    # Each lane has a maximum and a sum of its own; they meet once, at the end.
    most = tl.full((BLOCK,), LOW, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(logits + start + lane, mask=start + lane < vocabulary, other=LOW)
        x = x.to(tl.float32)
        higher = tl.maximum(most, x)
        total = total * tl.exp(most - higher) + tl.exp(x - higher)
        most = higher
    top = tl.max(most, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(most - top), axis=0))
    target = tl.load(targets_ptr + row)
    tl.store(losses_ptr + row, log_sum - tl.load(logits + target).to(tl.float32))
    weight = tl.load(weights_ptr + row)
    tl.debug_barrier()  # the target's logit is read before it is written over
    for start in range(0, vocabulary, BLOCK):
        word = start + lane
        x = tl.load(logits + word, mask=word < vocabulary, other=LOW).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(word == target, 1.0, 0.0)
        gradient = (gradient * weight).to(logits_ptr.dtype.element_ty)
        tl.store(logits + word, gradient, mask=word < vocabulary)


def loss_and_gradient_triton(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, *, block: int = 2048
) -> torch.Tensor:
    """As `loss_and_gradient_torch`; one program a row, logits contiguous."""
    losses = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
    _loss_kernel[(len(targets),)](
        logits_ptr=logits, targets_ptr=targets, weights_ptr=weights, losses_ptr=losses,
        vocabulary=logits.shape[1], LOW=_LOW, BLOCK=min(block, next_power_of_2(logits.shape[1])),
        num_warps=8,
    )  # fmt: skip
    return losses


def loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """logits [N, V] -> the loss of each [N]; logits become weights * their gradient, in place."""
    which = loss_and_gradient_triton if use_triton(logits) else loss_and_gradient_torch
    return which(logits, targets, weights)


class _AnswerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        norm: Norm | None,
        chunk: int,
        reweigh: Callable[[torch.Tensor], torch.Tensor] | None,
        cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        losses = torch.empty(len(tokens), dtype=wide, device=hidden.device)
        keeps = ctx.needs_input_grad[0]
        gradient = hidden.new_empty(len(tokens) if keeps else 0, hidden.shape[1])
        for start in range(0, len(tokens), chunk):
            part = slice(start, start + chunk)
            picked = hidden[tokens[part]]
            logits = (picked if norm is None else norm.forward(picked)) @ head.T
            slopes = None
            if cap is not None:
                logits = torch.tanh(logits / cap)
                slopes, logits = 1 - logits.square(), logits * cap
            losses[part] = loss_and_gradient(logits, targets[part], weights[part])
            if slopes is not None:
                logits *= slopes
            if keeps:
                d_picked = logits @ head
                gradient[part] = d_picked if norm is None else norm.backward(picked, d_picked)
        if reweigh is not None and keeps:
            gradient *= reweigh(losses).to(gradient.dtype)[:, None]
        ctx.save_for_backward(gradient, tokens)
        ctx.shape = hidden.shape
        ctx.mark_non_differentiable(losses)
        return (losses * weights.to(wide)).sum(), losses

    @staticmethod
    def backward(ctx: Any, d_total: torch.Tensor, _: torch.Tensor) -> Any:
        gradient, tokens = ctx.saved_tensors
        d_hidden = gradient.new_zeros(ctx.shape)
        d_hidden[tokens] = gradient * d_total.to(gradient.dtype)
        return d_hidden, None, None, None, None, None, None, None, None


def answer_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    norm: Norm | None = None,
    chunk: int = CHUNK,
    reweigh: Callable[[torch.Tensor], torch.Tensor] | None = None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropies of the tokens that follow `tokens`, and their weighted sum.

    hidden   [T, E], before the model's last norm where `norm` is given
    head     [V, E]
    tokens   [N] int64, rows of hidden, each once; none: the loss is zero
    targets  [N] int64, the token that follows each
    weights  [N] float32; 1 / (a run's answer tokens in the step) makes its loss their mean
    reweigh  losses [N] -> factors [N] of the gradient's parts, for a loss that is a function of
             several tokens' losses together; None: all are 1
    cap      at which the logits are cut off smoothly; None: they are not
    -> the sum of weight * loss, differentiable in hidden; the losses [N] float32, not weighted
    """
    out: tuple[torch.Tensor, torch.Tensor] = _AnswerLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, tokens, targets, weights, norm, chunk, reweigh, cap
    )
    return out
