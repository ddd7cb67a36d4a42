"""RopeTables: the cosines and sines of rotary position embedding, also scaled to longer contexts.

RoPE: Su et al., RoFormer (arXiv:2104.09864). The arithmetic follows transformers'
`modeling_rope_utils` operation by operation, so that the tables equal Hugging Face's bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from engine.errors import UnsupportedModel
from kernels.huge_pages import lazy_zeros
from kernels.rope import Pairs

_DEFAULT_THETA = 10_000.0
# Positions whose rows are computed at a time: some milliseconds, some megabytes.
_CHUNK = 4096


class RopeScaling(Protocol):
    """A change of the frequencies that theta gives."""

    @property
    def attention_factor(self) -> float:
        """The factor by which cosines and sines are multiplied."""

    @property
    def max_positions(self) -> int:
        """The context that it was made for, in tokens; 0 if its parameters do not say."""

    def scale(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the scaled inverse frequencies [D / 2] fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation: all positions are divided by a factor (arXiv:2306.15595)."""

    factor: float
    attention_factor: float = 1.0
    max_positions: int = 0

    def scale(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        return inverse / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: stretches long waves, keeps short ones, interpolates those between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    attention_factor: float = 1.0
    max_positions: int = 0

    def scale(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        low, high, original = self.low_freq_factor, self.high_freq_factor, self.original_positions
        wavelength = 2 * math.pi / inverse
        scaled = torch.where(wavelength > original / low, inverse / self.factor, inverse)
        smooth = (original / wavelength - low) / (high - low)
        smoothed = (1 - smooth) * scaled / self.factor + smooth * scaled
        is_between = (wavelength >= original / high) & (wavelength <= original / low)
        return torch.where(is_between, smoothed, scaled)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): scales by how often a wave turns within the original context."""

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def max_positions(self) -> int:
        return int(self.factor * self.original_positions)

    def scale(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        width = 2 * len(inverse)
        low = self._dimension(self.beta_fast, width, theta)
        high = self._dimension(self.beta_slow, width, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        if low == high:
            high += 0.001
        ramp = (torch.arange(len(inverse), dtype=torch.float32) - low) / (high - low)
        kept = 1 - ramp.clamp(0, 1)
        # 1 / (factor * x), not (1 / x) / factor: this rounds as Hugging Face does.
        exponents = torch.arange(0, width, 2).float() / width
        stretched = 1.0 / (self.factor * theta**exponents)
        return stretched * (1 - kept) + inverse * kept

    def _dimension(self, turns: float, width: int, theta: float) -> float:
        """Return the dimension whose wave turns `turns` times within the original context."""
        waves = math.log(self.original_positions / (turns * 2 * math.pi))
        return width * waves / (2 * math.log(theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """LongRoPE (arXiv:2402.13753) within its original context: each frequency has a divisor."""

    divisors: tuple[float, ...]
    attention_factor: float
    max_positions: int = 0

    def scale(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        width = 2 * len(inverse)
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        # 1 / (divisor * x), not (1 / x) / divisor: this rounds as Hugging Face does.
        return 1.0 / (torch.tensor(self.divisors) * theta**exponents)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """Gemma 4's: a share of the frequencies, the first, that are those of a whole head."""

    share: float
    factor: float
    attention_factor: float = 1.0
    max_positions: int = 0

    def scale(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        turning = torch.arange(len(inverse)) < int(self.share * len(inverse))
        return torch.where(turning, inverse, 0.0) / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rotation of q and k by their position.

    scaling  None: the frequencies are not scaled
    share    of a head's dimensions, the first, that turn
    is_interleaved  each even dimension turns with the next; else with the one half a width further
    """

    theta: float
    scaling: RopeScaling | None = None
    share: float = 1.0
    is_interleaved: bool = False

    def pairs(self, head_dim: int) -> Pairs | None:
        """Return which dimensions turn together; None: as in Llama."""
        width = int(head_dim * self.share)
        if width == head_dim and not self.is_interleaved:
            return None
        return Pairs(width, self.is_interleaved)


class QueryGrowth(NamedTuple):
    """Llama 4's scaling of q: 1 + beta ln(1 + floor(position / original context))."""

    beta: float
    original: int

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [T] -> [T] fp32"""
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.original))


class RopeTables:
    """Holds cos and sin, each [M, D] fp32 by position; the second half of a row repeats the first.

    Where a part of a head turns, the other angles are zero. `extend_to` fills rows. On a CPU, rows
    that are not filled yet take no memory.
    """

    def __init__(
        self, head_dim: int, rotation: Rotation, max_positions: int, device: torch.device
    ) -> None:
        theta, scaling = rotation.theta, rotation.scaling
        self.pairs = rotation.pairs(head_dim)
        width = head_dim if self.pairs is None else self.pairs.width
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        inverse = 1.0 / (theta**exponents)
        self._inverse = inverse if scaling is None else scaling.scale(inverse, theta)
        self._factor = 1.0 if scaling is None else scaling.attention_factor
        shape = (max_positions, head_dim)
        self.cos, self.sin = (
            lazy_zeros(*shape) if device.type == "cpu" else torch.empty(shape, device=device)
            for _ in range(2)
        )
        self._num_filled = 0

    def extend_to(self, num_positions: int) -> None:
        """Fill the rows of the first `num_positions` positions, unless they are there."""
        assert num_positions <= len(self.cos), "no token has a position beyond the tables"
        while self._num_filled < num_positions:
            start, end = self._num_filled, min(self._num_filled + _CHUNK, len(self.cos))
            angles = torch.outer(torch.arange(start, end).float(), self._inverse)
            for table, values, rest in ((self.cos, angles.cos(), 1), (self.sin, angles.sin(), 0)):
                values = values if self._factor == 1.0 else values * self._factor
                rows, half = table[start:end], table.shape[1] // 2
                for part in (rows[:, :half], rows[:, half:]):
                    part[:, : angles.shape[1]] = values
                    part[:, angles.shape[1] :] = rest
            self._num_filled = end


class LayerRopes:
    """The tables of each layer, None where nothing turns; layers that turn alike share theirs."""

    def __init__(
        self,
        head_dims: int | Sequence[int],
        rotations: Sequence[Rotation | None],
        max_positions: int,
        device: torch.device,
    ) -> None:
        """head_dims: the width of a head, in all layers or in each."""
        dims = [head_dims] * len(rotations) if isinstance(head_dims, int) else head_dims
        layers = [(d, each) for d, each in zip(dims, rotations, strict=True) if each is not None]
        made = {each: RopeTables(*each, max_positions, device) for each in dict.fromkeys(layers)}
        self._made = list(made.values())
        self.layers = tuple(
            None if each is None else made[d, each] for d, each in zip(dims, rotations, strict=True)
        )

    def extend_to(self, num_positions: int) -> None:
        """Fill the rows of the first `num_positions` positions."""
        for tables in self._made:
            tables.extend_to(num_positions)


def read_rotation(
    parameters: object,
    max_position_embeddings: int,
    *,
    theta: object = None,
    share: float | None = None,
    is_interleaved: bool = False,
    grows: bool = False,
) -> tuple[Rotation, QueryGrowth | None]:
    """Read a rope dict of config.json; raise UnsupportedModel naming the parameter.

    theta   the field `rope_theta`, which counts where the dict has none
    share   of a head that turns, unless the dict says otherwise; None: it must be all
    grows   whether the dict may have q's growth
    """
    given = _Parameters(parameters, rope_theta=theta)
    base = given.number("rope_theta", _DEFAULT_THETA)
    if base <= 1:
        raise UnsupportedModel(
            f"config.json: rope_theta is {base}, not above 1", param="rope_theta"
        )
    old_type = given.take("type", "default")
    rope_type = given.take("rope_type", old_type)
    readers: dict[str, Callable[[_Parameters, int], RopeScaling]] = {
        "linear": _linear,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
        "proportional": _proportional,
    }
    if rope_type != "default" and rope_type not in readers:
        raise UnsupportedModel(
            f"config.json: rope_type {rope_type!r} is not supported", param="rope_type"
        )
    grown = None
    if grows and (beta := given.optional("llama_4_scaling_beta")):
        original = given.peek("original_max_position_embeddings", max_position_embeddings)
        grown = QueryGrowth(beta, original)
        given.take("max_position_embeddings")
    scaling: RopeScaling | None = None
    if rope_type in readers:
        scaling = readers[rope_type](given, max_position_embeddings)
    if share is not None:
        share = given.number("partial_rotary_factor", share)
        if share > 1:
            raise UnsupportedModel(
                f"config.json: partial_rotary_factor is {share}, above 1",
                param="partial_rotary_factor",
            )
    given.check_all_taken()
    rotation = Rotation(
        theta=base, scaling=scaling, share=share or 1.0, is_interleaved=is_interleaved
    )
    return rotation, grown


def _linear(given: _Parameters, max_position_embeddings: int) -> LinearScaling:
    return LinearScaling(factor=given.number("factor"))


def _proportional(given: _Parameters, max_position_embeddings: int) -> ProportionalScaling:
    share = given.number("partial_rotary_factor", 1.0)
    return ProportionalScaling(share=share, factor=given.number("factor", 1.0))


def _longrope(given: _Parameters, max_position_embeddings: int) -> LongRope:
    original = given.whole("original_max_position_embeddings", max_position_embeddings)
    factor = given.number("factor", max_position_embeddings / original)
    attention_factor = 1.0
    if factor > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = given.take("short_factor")
    given.take("long_factor")  # for contexts longer than the original one, which are refused
    is_list = isinstance(divisors, list) and all(isinstance(d, int | float) for d in divisors)
    if not is_list or not all(d > 0 for d in divisors):
        raise UnsupportedModel(
            "config.json: rope parameter short_factor is not a list of numbers above zero",
            param="short_factor",
        )
    return LongRope(
        divisors=tuple(map(float, divisors)),
        attention_factor=given.number("attention_factor", attention_factor),
        max_positions=original,
    )


def _llama3(given: _Parameters, max_position_embeddings: int) -> Llama3Scaling:
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if high <= low:
        raise UnsupportedModel(
            f"config.json: high_freq_factor {high} is not above low_freq_factor {low}",
            param="high_freq_factor",
        )
    return Llama3Scaling(
        factor=given.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=given.whole("original_max_position_embeddings", max_position_embeddings),
    )


def _yarn(given: _Parameters, max_position_embeddings: int) -> YarnScaling:
    # As in Hugging Face: a factor of null means the ratio, a missing factor is an error.
    has_null = given.is_null("factor")
    original = given.whole("original_max_position_embeddings", max_position_embeddings)
    factor = given.number("factor", max_position_embeddings / original if has_null else None)
    mscale, mscale_all_dim = given.optional("mscale"), given.optional("mscale_all_dim")
    attention_factor = _mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_positions=original,
        attention_factor=given.number("attention_factor", attention_factor),
        beta_fast=given.optional("beta_fast") or 32.0,
        beta_slow=given.optional("beta_slow") or 1.0,
        truncate=bool(given.take("truncate", not given.is_null("truncate"))),
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class _Parameters:
    """The entries of a rope dict, each to be taken once; a `null` counts as missing.

    defaults  values of names that the dict does not have
    """

    def __init__(self, given: object, **defaults: object) -> None:
        if not isinstance(given, dict):
            raise UnsupportedModel(
                "config.json: rope_parameters is not an object", param="rope_parameters"
            )
        self._nulls = {name for name, value in given.items() if value is None}
        given = {name: value for name, value in given.items() if value is not None}
        self._given = {**defaults, **given}

    def is_null(self, name: str) -> bool:
        """Return whether the dict has the name with the value null."""
        return name in self._nulls

    def take(self, name: str, default: Any = None) -> Any:
        return self._given.pop(name, default)

    def peek(self, name: str, default: Any) -> Any:
        return self._given.get(name, default)

    def optional(self, name: str) -> float | None:
        """Take a finite number that is not negative; None if it is missing."""
        value = self.take(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise UnsupportedModel(
                f"config.json: rope parameter {name} is {value!r}, not a finite number "
                "of 0 or more",
                param=name,
            )
        return float(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Take a finite number above zero."""
        value = self.optional(name)
        value = default if value is None else value
        if value is None:
            raise UnsupportedModel(f"config.json: rope parameter {name} is missing", param=name)
        if value == 0:
            raise UnsupportedModel(
                f"config.json: rope parameter {name} is 0, not above 0", param=name
            )
        return value

    def whole(self, name: str, default: int) -> int:
        """Take a whole number above zero; as in Hugging Face, a null does not take the default."""
        return int(self.number(name, None if self.is_null(name) else default))

    def check_all_taken(self) -> None:
        for name, value in self._given.items():
            if value:
                raise UnsupportedModel(
                    f"config.json: rope parameter {name} is not supported", param=name
                )
