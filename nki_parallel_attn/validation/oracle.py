"""Dense float64 attention over a whole sequence. It knows nothing of ranks, blocks or layouts."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    present: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q.k) v in float64, one key per position 0..T-1.

    Args:
        q: [H, S, D]; head h reads KV head h // (H // KVH).
        k, v: [KVH, T, D].
        q_positions: [S] position of each query; a key is visible when its position is at or before it, and with a
            window W > 0 also after it minus W.
        present: [T] bool, keys that exist; None for all.

    Returns:
        [H, S, D] float64; 0 where a query sees no key.
    """
    q, k, v = (t.to(torch.float64) for t in (q, k, v))
    repeat = q.shape[0] // k.shape[0]
    k, v = (t.repeat_interleave(repeat, 0) for t in (k, v))
    positions = torch.arange(k.shape[1])
    visible = positions <= q_positions[:, None]
    if window:
        visible &= positions > q_positions[:, None] - window
    if present is not None:
        visible &= present
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    weights = torch.where(visible.any(1)[:, None], scores.softmax(-1), 0.0)
    return weights @ v
