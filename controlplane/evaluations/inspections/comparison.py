"""Compare what a worker computes on the probe's prompts with what PEFT computes. Pure.

Two things must agree. Each log-probability must be PEFT's within a tolerance, which depends on the
dtypes. And the adapter must act as strongly as PEFT says: with e the change of each log-probability
that the adapter makes by PEFT, and s the change on the worker, s ≈ c · e with c near 1. That finds
a wrong scale in bf16, where a single value could hide it.

The base alone is compared, too: if it differs, the worker or the inspector has another base model,
and the probe says nothing about the adapter.

A worker with a quantised base, or quantised keys and values, computes something else than PEFT even
without an adapter. How far its values are off without one then widens the tolerance of those with
one, and only a base that is another model's counts as different. A worker that keeps adapters in
FP8 is compared by the version's original; `copy_nats` says what its copy adds to the differences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed difference of log-probabilities: `absolute` + `relative` · |log-probability|."""

    absolute: float
    relative: float

    def of(self, logprob: float) -> float:
        return self.absolute + self.relative * abs(logprob)


#: Measured with SmolLM2 and random adapters of rank 4 on q and v: the engine in fp32 differs from
#: PEFT in fp32 by less than 0.002 (tests/e2e/test_probe.py), PEFT in bf16 from PEFT in fp32 by
#: 0.49 at most, 0.08 in root mean square.
FP32 = Tolerance(0.02, 0.002)
BF16 = Tolerance(0.75, 0.03)
#: Nats per token by which a quantised base may be from PEFT's; one further away is another model.
_OTHER_MODEL = 1.0
#: Allowed distance of the strength from 1, beyond what the base's differences explain.
STRENGTH = 0.2
#: Number of standard errors of the strength that count as noise.
_SIGMAS = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities of each prompt's tokens but the first, and of the likeliest last ones.

    logprobs  [prompt][position - 1]
    top       [prompt] token id -> log-probability at the last position
    """

    logprobs: list[list[float]]
    top: list[dict[int, float]]

    def values(self) -> list[float]:
        return [value for prompt in self.logprobs for value in prompt]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the comparison.

    problem       how the adapter's values differ; "": they agree
    base_problem  how the base's values differ, which says nothing about the adapter; "": they agree
    nats          what a token of the prompts is less likely on the worker than by PEFT, on average
    base_nats     the same without the adapter
    strength      c above; None: the adapter changes too little to say
    """

    problem: str
    base_problem: str
    tolerance: Tolerance
    max_difference: float
    base_max_difference: float
    nats: float
    base_nats: float
    strength: float | None
    num_values: int


def tolerance_for(*dtypes: str) -> Tolerance:
    """Return the tolerance between values of these dtypes."""
    return FP32 if all(dtype == "float32" for dtype in dtypes) else BF16


def compare(
    *,
    reference: Scores,
    served: Scores,
    base_reference: Scores,
    base_served: Scores,
    tolerance: Tolerance,
    is_quantized: bool = False,
) -> Verdict:
    """Compare the scores of the same prompts, by PEFT and by a worker, with and without adapter."""
    base_nats = _nats(base_reference, base_served)
    if is_quantized:
        noise = _largest(base_reference, base_served)
        tolerance = Tolerance(tolerance.absolute + 2 * noise, tolerance.relative)
        # Written so that NaN counts as a difference.
        is_near = abs(base_nats) <= _OTHER_MODEL
        base_problem = "" if is_near else f"a token is {base_nats:.2f} nats less likely on it"
    else:
        base_problem = _first_difference(base_reference, base_served, tolerance)
    strength, allowed = _strength(reference, served, base_reference, base_served)
    problem = _first_difference(reference, served, tolerance)
    if not problem and strength is not None and abs(strength - 1) > allowed:
        problem = (
            f"over all prompts the adapter acts {strength:.2f} times as strongly on the worker as "
            "by PEFT"
        )
    return Verdict(
        problem=problem,
        base_problem=base_problem,
        tolerance=tolerance,
        max_difference=_largest(reference, served),
        base_max_difference=_largest(base_reference, base_served),
        nats=_nats(reference, served),
        base_nats=base_nats,
        strength=strength,
        num_values=len(reference.values()),
    )


def copy_nats(reference: Scores, original: Scores, copy: Scores) -> float:
    """Return by how many nats a token of the copy is further from PEFT's than one of the original.

    On average; a million if one of the copy's is no finite number. The two alone could not be
    compared: over a base in FP8, a change of the last bit anywhere rounds activations to their
    neighbours, and a good copy changes a token by as much as the base does.
    """
    nats = _mean_distance(reference, copy) - _mean_distance(reference, original)
    return nats if math.isfinite(nats) else 1e6


def _mean_distance(reference: Scores, served: Scores) -> float:
    pairs = list(zip(reference.values(), served.values(), strict=True))
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))


def _largest(reference: Scores, served: Scores) -> float:
    pairs = zip(reference.values(), served.values(), strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _nats(reference: Scores, served: Scores) -> float:
    pairs = list(zip(reference.values(), served.values(), strict=True))
    return sum(a - b for a, b in pairs) / max(1, len(pairs))


def _first_difference(reference: Scores, served: Scores, tolerance: Tolerance) -> str:
    """Describe the largest difference beyond the tolerance; "" if there is none."""
    worst, said = 0.0, ""
    for prompt, (wanted, found) in enumerate(zip(reference.logprobs, served.logprobs, strict=True)):
        for position, (want, have) in enumerate(zip(wanted, found, strict=True), start=1):
            excess = abs(want - have) - tolerance.of(want)
            # Written so that NaN counts as a difference.
            if not excess <= worst:
                worst = excess if math.isfinite(excess) else math.inf
                said = _said(prompt, f"position {position}", want, have)
    for prompt, (top, have_top) in enumerate(zip(reference.top, served.top, strict=True)):
        for token in top.keys() & have_top.keys():
            excess = abs(top[token] - have_top[token]) - tolerance.of(top[token])
            if not excess <= worst:
                worst = excess if math.isfinite(excess) else math.inf
                said = _said(prompt, f"token {token} last", top[token], have_top[token])
    return said


def _said(prompt: int, where: str, want: float, have: float) -> str:
    return (
        f"prompt {prompt + 1}, {where}: the log-probability is {want:.4f} by PEFT and {have:.4f} "
        "on the worker"
    )


def _strength(
    reference: Scores, served: Scores, base_reference: Scores, base_served: Scores
) -> tuple[float | None, float]:
    """Return c, fitted by least squares, and its allowed distance from 1; (None, 0) without effect.

    Each change is clipped, so that one unlikely token does not decide.
    """
    effect = _clipped(reference.values(), base_reference.values())
    found = _clipped(served.values(), base_served.values())
    energy = sum(e * e for e in effect)
    noise = [a - b for a, b in zip(base_reference.values(), base_served.values(), strict=True)]
    variance = 2 * sum(n * n for n in noise) / max(1, len(noise))
    if energy <= 0.0 or not math.isfinite(energy) or not all(map(math.isfinite, found)):
        return None, 0.0
    error = math.sqrt(variance / energy)
    if _SIGMAS * error > 1.0:
        return None, 0.0  # the noise hides the adapter
    strength = sum(e * f for e, f in zip(effect, found, strict=True)) / energy
    return strength, STRENGTH + _SIGMAS * error


def _clipped(with_adapter: Sequence[float], without: Sequence[float]) -> list[float]:
    return [min(4.0, max(-4.0, a - b)) for a, b in zip(with_adapter, without, strict=True)]


def scores_of(prompts: Any, which: str) -> Scores:
    """Read the child's `prompts`; which: "adapter" or "base". Raises ValueError, KeyError, ..."""
    return Scores(
        logprobs=[[float(value) for value in prompt[which]["logprobs"]] for prompt in prompts],
        top=[
            {int(token): float(value) for token, value in prompt[which]["top"]}
            for prompt in prompts
        ],
    )
