"""The decode block in float64, stage by stage over the whole model; it knows nothing of ranks, blocks or layouts.

Rounding to X's dtype happens where the twin says that it does; with float64 inputs nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Norm:
    eps: float
    gamma: Tensor | None = None

    def __call__(self, x: Tensor, width: int | None = None) -> Tensor:
        normed = x / (x.pow(2).sum(-1, keepdim=True) / (width or x.shape[-1]) + self.eps).sqrt()
        return normed if self.gamma is None else normed * self.gamma.double()


def rope(x: Tensor, cos: Tensor, sin: Tensor, contiguous: bool) -> Tensor:
    """x [B, heads, S, d]; cos, sin [r, B, S]. One channel pair at a time."""
    out = x.clone()
    pairs = len(cos)
    for pair in range(pairs):
        a, b = (pair, pairs + pair) if contiguous else (2 * pair, 2 * pair + 1)
        c, s = (t[pair].double()[:, None] for t in (cos, sin))
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
    return out


def new_tokens(
    x: Tensor,
    project: Callable[[Tensor], Tensor],
    *,
    q_heads: int,
    kv_heads: int,
    norm_x: Norm | None,
    hidden_actual: int,
    norms_pre: tuple[Norm, Norm] | None,
    norms_post: tuple[Norm, Norm] | None,
    rotary: tuple[Tensor, Tensor, bool] | None,
    rounded: Rounding,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q [B, q_heads, S, d], K and V [B, kv_heads, S, d] of x [B, S, H]."""
    batch, tokens = x.shape[:2]
    x = x.double()
    if norm_x:
        x = rounded(norm_x(x, hidden_actual))
    qkv = rounded(project(x)).view(batch, tokens, q_heads + 2 * kv_heads, -1).transpose(1, 2)
    q, k, v = qkv[:, :q_heads], qkv[:, q_heads : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
    pair = [q, k]
    for index in range(2):
        if norms_pre:
            pair[index] = norms_pre[index](pair[index])
        if rotary:
            pair[index] = rope(pair[index], *rotary)
        if norms_post:
            pair[index] = norms_post[index](pair[index])
    return rounded(pair[0]), rounded(pair[1]), v


def attention(
    q: Tensor,
    prior: list[tuple[Tensor, Tensor]],
    k: Tensor,
    v: Tensor,
    seen_prior: list[Tensor],
    seen_active: Tensor,
    *,
    scale: float,
    sink: Tensor | None,
) -> Tensor:
    """[B, H, S, d], one sequence, head and token at a time.

    Args:
        prior: for each sequence K and V [KV, length, d].
        seen_prior: for each sequence [H, S, length] bool.
        seen_active: [S (key), B, H, S (query)] bool.
    """
    out = torch.zeros_like(q)
    heads, tokens = q.shape[1:3]
    for row in range(len(q)):
        for head in range(heads):
            kv = head // (heads // k.shape[1])
            keys = torch.cat([prior[row][0][kv].double(), k[row, kv]])
            values = torch.cat([prior[row][1][kv].double(), v[row, kv]])
            for token in range(tokens):
                seen = torch.cat([seen_prior[row][head, token], seen_active[:, row, head, token]])
                scores = keys[seen] @ q[row, head, token] * scale
                if sink is not None:
                    scores = torch.cat([scores, sink[head].double()])
                if len(scores):
                    weights = scores.softmax(0)[: int(seen.sum())]
                    out[row, head, token] = weights @ values[seen]
    return out
