"""Inputs of attention_const_max and their float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nki_parallel_attn import AttentionLayout
from tests.oracle import dense_attention

HEAD, SEQ = AttentionLayout.HEAD_MAJOR, AttentionLayout.SEQ_MAJOR
HEAD_DIM = 128


@dataclass(frozen=True)
class Case:
    """Random normal Q, K, V with scores of standard deviation 1, and what they should give."""

    heads: int
    queries: int
    keys: int
    dtype: torch.dtype = torch.bfloat16
    q_layout: AttentionLayout = HEAD
    k_layout: AttentionLayout = HEAD
    scale: float | None = None
    seed: int = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K, V, all [N, S, d]."""
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(
            torch.randn(self.heads, rows, HEAD_DIM, generator=generator).to(self.dtype)
            for rows in (self.queries, self.keys, self.keys)
        )  # type: ignore[return-value]

    def arguments(self) -> dict[str, Any]:
        """Arguments of attention_const_max, without softmax_max."""
        q, k, v = self.tensors()
        return {
            "q_hbm": in_layout(q, self.q_layout),
            "k_hbm": in_layout(k, self.k_layout),
            "v_hbm": v,
            "softmax_scale": self.scale,
            "q_layout": self.q_layout,
            "k_layout": self.k_layout,
        }

    def expected(self) -> Tensor:
        """float64 [N, Sq, d]; every query sees every key."""
        q, k, v = self.tensors()
        last = torch.full((self.queries,), self.keys - 1)
        return dense_attention(q, k, v, last, scale=HEAD_DIM**-0.5 if self.scale is None else self.scale)


def in_layout(t: Tensor, layout: AttentionLayout) -> Tensor:
    return t.transpose(1, 2).contiguous() if layout is HEAD else t


def as_tensor(softmax_max: float) -> Tensor:
    """The tensor form of softmax_max."""
    return torch.full((HEAD_DIM, 1), softmax_max)
