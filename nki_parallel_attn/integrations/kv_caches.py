"""A rank's paged K and V caches, one of each per layer, in the model's dtype or in float8.

float8 caches hold clamp(K) and clamp(V) with scale 1, as serving stacks do without calibration: e4m3 has the same
relative precision from 2^-6 to its maximum of 240, and both kernels round to it and back in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 240.0
"""Largest finite value of NON_OCP float8, the operations' default dtype_mode."""
SCALE_ROWS = 128


@dataclass(frozen=True)
class KVCaches:
    """Caches of all layers.

    Attributes:
        k, v: per layer [num_blocks, kv_heads, block_size, head_dim], all of one dtype.
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]

    @classmethod
    def zeros(cls, shape: Sequence[int], layers: int, dtype: torch.dtype, device: torch.device) -> KVCaches:
        """Empty caches of `shape`, as `RankView.cache_shape` gives it."""
        pairs = [torch.zeros(2, *shape, dtype=dtype, device=device) for _ in range(layers)]
        return cls([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    @property
    def nbytes(self) -> int:
        """Bytes of K and V over all layers."""
        return sum(cache.nbytes for cache in (*self.k, *self.v))

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored tokens."""
        return self.k[0].dtype

    def stored(self, tokens: Tensor) -> Tensor:
        """`tokens` in the caches' dtype."""
        return to_fp8(tokens) if self.dtype == FP8 else tokens

    def scales(self) -> dict[str, Any]:
        """`k_scale` and `v_scale` of both attention operations: ones for float8, nothing otherwise."""
        if self.dtype != FP8:
            return {}
        one = torch.ones(SCALE_ROWS, 1, device=self.k[0].device)
        return {"k_scale": one, "v_scale": one}


def to_fp8(tokens: Tensor) -> Tensor:
    """`tokens` clamped to FP8_MAX and rounded to float8_e4m3fn."""
    return tokens.clamp(-FP8_MAX, FP8_MAX).to(FP8)
