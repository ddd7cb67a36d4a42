"""Gumbel noise for drawing tokens: one number for each key and token, whatever else is drawn.

A token is drawn as the largest of `logit / temperature + noise`, where the noise of each token is
its own and Gumbel distributed; each is then drawn as often as its probability says. Source:
Gumbel-max; Maddison et al., A* sampling (arXiv:1411.0030), section 2.

The noise does not depend on the logits. So logits that are rounded differently, as in a batch of
another size, give another token only if the two best sums are as close as the rounding. Inverting
the cumulative distribution at one number would change more tokens: a rounded logit there moves the
place of every token after it.
"""

from __future__ import annotations

import torch

_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)  # odd; from SplitMix64 (Steele et al., OOPSLA'14)
_SIGN = -(1 << 63)


def token_codes(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return [V] int64, a fixed code for each token."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(_SIGN, -_SIGN - 1, (vocab_size,), generator=generator).to(device)


def gumbel_noise(keys: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return noise [N, K] fp32, finite, for keys [N, 1] int64, odd, and codes [K] or [N, K]."""
    hashed = codes * keys  # enough for a few tokens; the rest of the hash is for many
    hashed.bitwise_xor_(hashed >> 32)
    hashed.mul_(_FACTOR).bitwise_or_(_SIGN)
    # Uniform in [-1, 0). Floats are finer near 0, where the noise is large.
    uniform = hashed.float().mul_(2.0**-63).clamp_min_(2.0**-24 - 1)
    return uniform.log1p_().neg_().log_().neg_()
