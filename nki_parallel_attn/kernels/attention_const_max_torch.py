"""The torch twin of attention_const_max: fused attention, and what the constant maximum does to it.

The maximum cancels in the quotient, so it shows only where exp(score - softmax_max) leaves the range of float32. Fused
attention gives the quotient and the log-sum-exp of each row; from that follows the sum of the exponentials, and with it
the rows that the constant maximum would have lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nki_parallel_attn.kernels.online_softmax_torch import attend, attend_backward


def attention_const_max(q: Tensor, k: Tensor, v: Tensor, softmax_max: float | Tensor, scale: float) -> Tensor:
    """Attention of q [N, Sq, d] over k, v [N, Sk, d]; differentiable in q, k and v.

    Args:
        softmax_max: a number or a tensor of one element, subtracted from the scaled scores before exp.
        scale: multiplies the scores.

    Returns:
        [N, Sq, d] of q's dtype; NaN in rows whose sum of exponentials is infinite or at most Sk times the smallest
        normal number, in float32 (float64 for float64 inputs).
    """
    out: Tensor = _ConstMax.apply(q, k, v, softmax_max, scale)  # type: ignore[no-untyped-call]
    return out


class _ConstMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, softmax_max: float | Tensor, scale: float) -> Tensor:
        out, lse = attend(q, k, v, scale)
        total = (lse - softmax_max).exp()
        held = (total > k.shape[1] * torch.finfo(total.dtype).tiny) & total.isfinite()
        out.masked_fill_(~held[..., None], torch.nan)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = attend_backward(grad_out, q, k, v, out, lse, ctx.scale)
        return grad_q, grad_k, grad_v, None, None
