"""Rotary position embedding of decoding, full or partial, for both orders of a head's channels."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, contiguous: bool) -> Tensor:
    """Rotate the first 2*r channels of every head; the others pass through.

    Args:
        x: [B, heads, S, d].
        cos, sin: [r, B, S], 2*r <= d; one angle for each pair of channels.
        contiguous: pair i is channels (i, r + i), else (2*i, 2*i + 1).

    Returns:
        [B, heads, S, d] of x's dtype; computed in it.
    """
    rotary = 2 * cos.shape[0]
    cos, sin = (t.to(x.dtype).permute(1, 2, 0)[:, None] for t in (cos, sin))
    turned = x[..., :rotary]
    if contiguous:
        first, second = turned.chunk(2, -1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    halves = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.cat(halves, -1) if contiguous else torch.stack(halves, -1).flatten(-2)
    return turned if rotary == x.shape[-1] else torch.cat([turned, x[..., rotary:]], -1)
