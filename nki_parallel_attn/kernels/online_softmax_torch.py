"""Online softmax in torch: attention over a part of the keys with its log-sum-exp, and the merge of such parts.

A part is (out, lse): `out` is normalised over the keys of that part alone, `lse` the log-sum-exp of its scaled scores.
A row that sees no key has out = 0 and lse = -inf, so that it weighs nothing in a merge; a row that sees nothing
anywhere stays 0. Statistics and merges are float32 (float64 for float64 inputs); the fused op rounds a part's `out` to
the input dtype.

Heads: q [H, n, D], k and v [KVH, m, D]; query head h reads KV head h // (H // KVH). K and V are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements of one float32 work buffer: of a merge (stays in a core's cache), and of the scores where no fused op exists.
MERGE_CHUNK = 1 << 17
SCORE_CHUNK = 1 << 24


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps and merges for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over these keys alone.

    Args:
        q, k, v: [H, n, D], [KVH, m, D], [KVH, m, D]; m may be 0.
        causal: row i sees keys 0..i. Needs n == m.
        mask: [n, m] bool, True where visible; not together with `causal`.

    Returns:
        out [H, n, D] of q's dtype, lse [H, n] of `stat_dtype`.
    """
    if k.shape[1] == 0:  # the fused op dies on it
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=stat_dtype(q.dtype))
    if q.device.type != "cpu":
        return _attend_unfused(q, k, v, scale, causal, mask)
    sign = _sign(scale, q.dtype)
    if sign < 1:
        return attend(q * sign, k, v, -scale if sign else 1.0, causal=causal, mask=mask)
    q, k, v = (_with_dense_rows(t) for t in (q, k, v))
    folded = not causal and mask is None
    rows = _fold_heads(q, k) if folded else q[None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, k[None], v[None], 0.0, causal, attn_mask=_additive(mask, q.dtype), scale=scale
    )
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:2])
    if mask is not None:
        # The fused op returns 0, not -inf, as the log-sum-exp of a row that sees nothing.
        lse = lse.masked_fill(~mask.any(1), -torch.inf)
    return out, lse


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients, given the output and log-sum-exp merged over all keys.

    Args:
        grad_out, out: [H, n, D]; `out` and `lse` [H, n] are the merged ones.
        q, k, v, causal, mask: as in `attend`.

    Returns:
        The contributions to grad_q [H, n, D], grad_k and grad_v [KVH, m, D].
    """
    # exp(score - lse) must not become exp(inf) where a row sees nothing at all.
    lse = lse.masked_fill(lse == -torch.inf, 0)
    if q.device.type != "cpu":
        return _attend_backward_unfused(grad_out, q, k, v, out, lse, scale, causal, mask)
    sign = _sign(scale, q.dtype)
    if sign < 1:
        positive = -scale if sign else 1.0
        parts = attend_backward(grad_out, q * sign, k, v, out, lse, positive, causal=causal, mask=mask)
        return parts[0] * sign, parts[1], parts[2]
    grad_out, q, k, v, out = (_with_dense_rows(t) for t in (grad_out, q, k, v, out))
    folded = not causal and mask is None
    grad_rows, rows, out_rows = (_fold_heads(t, k) if folded else t[None].contiguous() for t in (grad_out, q, out))
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_rows,
        rows,
        k[None],
        v[None],
        out_rows,
        lse.reshape(rows.shape[:3]),
        0.0,
        causal,
        attn_mask=_additive(mask, q.dtype),
        scale=scale,
    )
    return grad_q.reshape(q.shape), grad_k[0], grad_v[0]


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], merged: Tensor) -> Tensor:
    """Merge parts over disjoint keys into `merged`, [H, n, D] of any strides, which may be one of `outs`.

    Args:
        outs: each [H, n, D].
        lses: each [H, n].

    Returns:
        The merged log-sum-exp, [H, n]; -inf where no part sees a key, and `merged` is 0 there.
    """
    stacked = torch.stack(list(lses))
    peak = stacked.amax(0)
    weights = (stacked - peak.masked_fill(peak == -torch.inf, 0)).exp_()
    total = weights.sum(0)
    lse = peak + total.log()
    # Divided, not exp(stacked - lse): the weights sum to 1 however large the log-sum-exps are.
    weights = (weights / total.masked_fill(total == 0, 1))[..., None]
    heads, rows, dim = merged.shape
    step = max(1, MERGE_CHUNK // (heads * dim))
    buffers = torch.empty(2, heads, min(step, rows), dim, dtype=lse.dtype, device=lse.device)
    for start in range(0, rows, step):
        chunk = (slice(None), slice(start, start + step))
        sums, part = buffers[:, :, : min(step, rows - start)]
        torch.mul(sums.copy_(outs[0][chunk]), weights[0][chunk], out=sums)
        for out, weight in zip(outs[1:], weights[1:], strict=True):
            sums.addcmul_(part.copy_(out[chunk]), weight[chunk])
        merged[chunk] = sums
    return lse


def _sign(scale: float, dtype: torch.dtype) -> int:
    """Of what the fused op, which scales in `stat_dtype`, makes of `scale`.

    It takes a positive scale only: it hides scores by -inf first and scales them then.
    """
    smallest = torch.finfo(stat_dtype(dtype)).tiny
    return (scale >= smallest) - (scale <= -smallest)


def _with_dense_rows(t: Tensor) -> Tensor:
    """The fused op takes a last dim of any stride for one of stride 1."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _fold_heads(t: Tensor, k: Tensor) -> Tensor:
    """[H, n, D] to [1, KVH, H // KVH * n, D]: without a mask, query heads of one KV head are just more rows."""
    return t.reshape(1, k.shape[0], -1, t.shape[2])


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[None, None]


def _visible_scores(q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None, start: int) -> Tensor:
    """Scaled scores [KVH, H // KVH, n, m] of query rows start.., -inf where hidden."""
    stat = stat_dtype(q.dtype)
    scores = torch.einsum("gknd,gmd->gknm", torch.unflatten(q, 0, (k.shape[0], -1)).to(stat), k.to(stat)) * scale
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(start)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _row_chunks(q: Tensor, k: Tensor) -> list[slice]:
    step = max(1, SCORE_CHUNK // (q.shape[0] * k.shape[1]))
    return [slice(start, start + step) for start in range(0, q.shape[1], step)]


def _attend_unfused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=stat_dtype(q.dtype))
    for rows in _row_chunks(q, k):
        scores = _visible_scores(q[:, rows], k, scale, causal, None if mask is None else mask[rows], rows.start)
        chunk = scores.logsumexp(-1)
        weights = (scores - chunk.masked_fill(chunk == -torch.inf, 0)[..., None]).exp_()
        out[:, rows] = torch.einsum("gknm,gmd->gknd", weights, v.to(scores.dtype)).flatten(0, 1).to(q.dtype)
        lse[:, rows] = chunk.flatten(0, 1)
    return out, lse


def _attend_backward_unfused(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    stat = stat_dtype(q.dtype)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros(t.shape, dtype=stat, device=t.device) for t in (k, v))
    for rows in _row_chunks(q, k):
        heads = (k.shape[0], -1)
        scores = _visible_scores(q[:, rows], k, scale, causal, None if mask is None else mask[rows], rows.start)
        weights = (scores - torch.unflatten(lse[:, rows], 0, heads)[..., None]).exp_()
        grad = torch.unflatten(grad_out[:, rows], 0, heads).to(stat)
        delta = (grad * torch.unflatten(out[:, rows], 0, heads).to(stat)).sum(-1, keepdim=True)
        grad_scores = weights * (torch.einsum("gknd,gmd->gknm", grad, v.to(stat)) - delta) * scale
        grad_q[:, rows] = torch.einsum("gknm,gmd->gknd", grad_scores, k.to(stat)).flatten(0, 1).to(q.dtype)
        grad_k += torch.einsum("gknm,gknd->gmd", grad_scores, torch.unflatten(q[:, rows], 0, heads).to(stat))
        grad_v += torch.einsum("gknm,gknd->gmd", weights, grad)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)
