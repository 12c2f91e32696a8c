"""Rotary position embedding as Llama-family checkpoints use it: frequencies with their scaling rules, and the rotation.

Two orders of a head's channels are in use. A pair that rotates together is (2i, 2i+1) in ADJACENT_PAIRS (the original
paper, glassllm) and (i, i + head_dim/2) in HALF_SPLIT (Hugging Face checkpoints). `half_split_order` is the permutation
from the first to the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError


class RopeOrder(Enum):
    """Which channels of a head form a rotating pair."""

    ADJACENT_PAIRS = "adjacent_pairs"
    HALF_SPLIT = "half_split"


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, "Extending Context Window via Positional Interpolation")."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with the sequence once that is longer than `original_context` (dynamic NTK)."""

    factor: float
    original_context: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths over original_context/low_freq_factor are stretched, a ramp leads there (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """Interpolation by wavelength with a ramp between beta_fast and beta_slow (Peng et al. 2023, "YaRN").

    `attention_factor` scales cos and sin; `truncate` rounds the ramp's ends to whole channels.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class Rope:
    """One model's rotary embedding.

    Args:
        head_dim: channels of a head, even; all of them rotate.
        theta: base of the frequencies theta**(-2i/head_dim).
        order: which channels form a pair.
        scaling: rule for contexts longer than the original one.
        dtype: in which angles are computed; float32 as transformers does, float64 as glassllm does.

    Raises:
        ArgumentError: an odd head_dim.
    """

    head_dim: int
    theta: float = 10000.0
    order: RopeOrder = RopeOrder.HALF_SPLIT
    scaling: RopeScaling | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ArgumentError("head_dim", self.head_dim, "an even number: rotary embedding rotates pairs of channels")

    def frequencies(self, sequence_length: int) -> Tensor:
        """Radians per position, [head_dim/2]; only DynamicScaling depends on `sequence_length`."""
        scaling, theta = self.scaling, self.theta
        if isinstance(scaling, DynamicScaling):
            stretch = max(sequence_length, scaling.original_context) / scaling.original_context
            theta *= (scaling.factor * stretch - (scaling.factor - 1)) ** (self.head_dim / (self.head_dim - 2))
        plain = 1.0 / theta ** (torch.arange(0, self.head_dim, 2, dtype=self.dtype) / self.head_dim)
        if isinstance(scaling, LinearScaling):
            return plain / scaling.factor
        if isinstance(scaling, Llama3Scaling):
            return _llama3_frequencies(plain, scaling)
        if isinstance(scaling, YarnScaling):
            return _yarn_frequencies(plain, scaling, theta)
        return plain

    def cos_sin(self, positions: Tensor, sequence_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at `positions` [S], each [S, head_dim/2] in `dtype`.

        All calls whose keys meet in one cache must name the same `sequence_length`: under DynamicScaling it sets the
        frequencies.
        """
        angles = positions[:, None].to(self.dtype) * self.frequencies(sequence_length).to(positions.device)
        factor = self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `heads` [n, S, head_dim] by cos, sin [S, head_dim/2]; same shape and dtype."""
        if self.order is RopeOrder.HALF_SPLIT:
            first, second = heads.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        first, second = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def half_split_order(head_dim: int) -> Tensor:
    """Channel order [head_dim] that turns an ADJACENT_PAIRS head into a HALF_SPLIT one: new = old[order]."""
    return torch.arange(head_dim).view(-1, 2).T.reshape(-1)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor on cos and sin when a checkpoint names none."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _llama3_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn_frequencies(plain: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    channels = 2 * len(plain)

    def channel_of(turns: float) -> float:
        """The channel pair that turns `turns` times over the original context."""
        return channels * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    ramp = (torch.arange(len(plain), dtype=plain.dtype) - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0, 1)
    return stretched * plain / scaling.factor + (1 - stretched) * plain
