"""Explain the figures of an adapter's matrices to its owner. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

#: Relative change of one matrix above which an adapter is no longer a fine-tuning.
LARGE_CHANGE = 0.5
#: Largest relative change below which an adapter changes almost nothing.
WEAK_CHANGE = 1e-4
#: The step of bf16, whose mantissa has 8 bits: a smaller change is lost when it is merged.
BF16_STEP = 2.0**-8
#: The usual alpha / rank is 0.5 to 4.
USUAL_SCALING = (0.25, 8.0)
#: Share of the energy above which one layer stands out, in models with at least this number of
#: layers.
DOMINANT_SHARE, MIN_LAYERS = 0.5, 4
ENOUGH_ENERGY = 0.99
_MAX_NAMED = 5

Told = dict[str, Any]


def findings_of(modules: Sequence[Told]) -> list[Told]:
    """Return the findings: {"code", "level": "warning" | "note", "message"}.

    modules  as `factors.Adapter.modules` tells them
    """
    checks = (_dead, _dominant, _large, _weak, _rank, _scaling)
    found = [finding for check in checks if (finding := check(modules)) is not None]
    return sorted(found, key=lambda finding: finding["level"] == "note")


def summary_of(modules: Sequence[Told]) -> Told:
    """Return the figures of all matrices together."""
    energy = sum(module["frobenius"] ** 2 for module in modules)
    ranks = [module["effective_rank"] for module in modules if module["frobenius"]]
    relative = [module["relative"] for module in modules if module["relative"] is not None]
    return {
        "modules": len(modules),
        "layers": len({m["layer"] for m in modules if m["layer"] is not None}),
        "rank": max((module["rank"] for module in modules), default=0),
        "frobenius": float(f"{energy**0.5:.4g}"),
        "mean_effective_rank": round(sum(ranks) / len(ranks), 2) if ranks else 0.0,
        "largest_relative": max(relative, default=None),
        "enough_rank": enough_rank(modules),
    }


def enough_rank(modules: Sequence[Told]) -> int | None:
    """Return the smallest power of two that, as rank, keeps 99% of the energy of all matrices.

    None if there is no energy, or the singular values that are told do not reach it.
    """
    total = sum(module["frobenius"] ** 2 for module in modules)
    if total <= 0.0:
        return None
    rank, longest = 1, max(len(module["singular_values"]) for module in modules)
    while True:
        kept = sum(v * v for module in modules for v in module["singular_values"][:rank])
        if kept >= ENOUGH_ENERGY * total:
            return rank
        if rank >= longest:
            return None
        rank *= 2


def _finding(code: str, message: str, *, level: str = "warning") -> Told:
    return {"code": code, "level": level, "message": message}


def _named(modules: Sequence[Told]) -> str:
    names = [module["module"].removeprefix("model.") for module in modules[:_MAX_NAMED]]
    more = len(modules) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _dead(modules: Sequence[Told]) -> Told | None:
    dead = [module for module in modules if not module["frobenius"]]
    if not dead:
        return None
    if len(dead) == len(modules):
        message = "Every B is zero, as before training: the LoRA changes nothing."
        return _finding("no_effect", message)
    message = f"{len(dead)} of {len(modules)} matrices are unchanged, their B is zero: "
    return _finding("dead_modules", f"{message}{_named(dead)}.")


def _dominant(modules: Sequence[Told]) -> Told | None:
    energy: dict[int, float] = defaultdict(float)
    for module in modules:
        if module["layer"] is not None:
            energy[module["layer"]] += module["frobenius"] ** 2
    total = sum(energy.values())
    if len(energy) < MIN_LAYERS or total <= 0.0:
        return None
    layer, most = max(energy.items(), key=lambda item: item[1])
    if most < DOMINANT_SHARE * total:
        return None
    message = f"Layer {layer} has {most / total:.0%} of the change of all {len(energy)} layers."
    return _finding("one_layer_dominates", message)


def _large(modules: Sequence[Told]) -> Told | None:
    large = [m for m in modules if m["relative"] is not None and m["relative"] >= LARGE_CHANGE]
    if not large:
        return None
    large.sort(key=lambda module: -module["relative"])
    message = (
        f"{len(large)} of {len(modules)} matrices change by half of the base's norm or more, "
        f"the most by {large[0]['relative']:.0%}: {_named(large)}. A lower learning rate or alpha "
        "keeps more of what the base knows."
    )
    return _finding("large_change", message)


def _weak(modules: Sequence[Told]) -> Told | None:
    relative = [m["relative"] for m in modules if m["relative"] is not None and m["frobenius"]]
    if not relative:
        return None
    if max(relative) < WEAK_CHANGE:
        message = (
            f"No matrix changes by more than {max(relative):.2%} of the base's norm: it hardly "
            "acts. Train longer, or with a higher learning rate."
        )
        return _finding("weak", message)
    small = sum(value < BF16_STEP for value in relative)
    if small * 2 < len(relative):
        return None
    message = (
        f"{small} of {len(relative)} changed matrices change by less than bf16's step of "
        f"{BF16_STEP:.1%}. Lorikeet adds them to the product, where they count; merged into bf16 "
        "weights they would round away."
    )
    return _finding("below_bf16_step", message, level="note")


def _rank(modules: Sequence[Told]) -> Told | None:
    rank = max((module["rank"] for module in modules), default=0)
    enough = enough_rank(modules)
    if enough is None or enough * 2 > rank:
        return None
    ranks = sorted(m["effective_rank"] for m in modules if m["frobenius"])
    message = (
        f"Rank {enough} would do: the {enough} largest directions of each matrix have 99% of the "
        f"change, and the median effective rank is {ranks[len(ranks) // 2]:.1f} of {rank}. A "
        "smaller rank loads faster and takes less device memory."
    )
    return _finding("rank_too_large", message, level="note")


def _scaling(modules: Sequence[Told]) -> Told | None:
    low, high = USUAL_SCALING
    odd = [m for m in modules if not low <= abs(m["scaling"]) <= high]
    if not odd:
        return None
    message = (
        f"The scale of {len(odd)} of {len(modules)} matrices (alpha / rank, with rsLoRA alpha / "
        f"√rank) is {odd[0]['scaling']:g}; usual is 0.5 to 4. Check that lora_alpha is the value "
        "that "
        "was trained with."
    )
    return _finding("unusual_scale", message)
