"""Attention of a decoding step on one rank: the prior in the cache and the active tokens, merged as they are read.

Rows: the query heads of one KV head and the S_tkg tokens are rows of one matrix, q [B, KVH, R, d] with R =
(heads per KV head)*S_tkg, row = head*S_tkg + token. K and V are never repeated, a prefix needs no mask: one fused call
over the visible slots. Log-sum-exps and merges are float32 (float64 for float64 inputs); the fused op rounds a partial
to q's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.kernels.decode_cache_torch import PriorCache
from nki_parallel_attn.kernels.online_softmax_torch import stat_dtype

# Below this many slots for each thread, a call is not worth cutting for the others' sake.
SPLIT_SLOTS = 1024


class RunningSoftmax:
    """Partials over disjoint keys, merged one by one.

    Attributes:
        out: [B, KVH, R, d], normalised over the keys so far; 0 where a row has seen none.
        lse: [B, KVH, R], -inf where a row has seen none.
    """

    def __init__(self, q: Tensor) -> None:
        stat = stat_dtype(q.dtype)
        self.out = torch.zeros(q.shape, dtype=stat, device=q.device)
        self.lse = torch.full(q.shape[:3], -torch.inf, dtype=stat, device=q.device)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a partial of the sequences `rows`."""
        old = self.lse[rows]
        # exp(lse) / (exp(old) + exp(lse)); a partial without keys weighs nothing, beside another one too.
        weight = torch.sigmoid(lse - old).masked_fill_(lse == -torch.inf, 0)
        self.out[rows].lerp_(out.to(self.out.dtype), weight[..., None])
        torch.logaddexp(old, lse, out=old)


def fold_heads(q: Tensor, kv_heads: int) -> Tensor:
    """[B, H, S, d] to dense rows [B, KVH, R, d]."""
    return q.reshape(q.shape[0], kv_heads, -1, q.shape[3]).contiguous()


def attend_active(state: RunningSoftmax, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> None:
    """Merge the active tokens.

    Args:
        q: rows; k, v: [B, KVH, S_tkg, d].
        mask: [S_tkg, B, H, S_tkg] bool (key, sequence, head, query).
    """
    state.add(slice(None), *masked_partial(q, k, v, _row_mask(mask, k.shape[1]), scale))


def attend_prefix(
    state: RunningSoftmax, q: Tensor, prior: PriorCache, first: Tensor, stop: Tensor, scale: float
) -> None:
    """Merge the prior where query token s of sequence b sees slots [first[b, s], stop[b]).

    Args:
        first: [B, S_tkg] int64 on the CPU; stop: [B], as well.
    """
    tokens = first.shape[1]
    first = first.minimum(stop[:, None])
    # A window's start moves with the token: only the slots between the first and the last start need a mask.
    low, high, ends = first.amin(1).tolist(), first.amax(1).tolist(), stop.tolist()
    batch = 0
    while batch < len(ends):
        until = batch + 1
        while until < len(ends) and prior.batched and (high[until], ends[until]) == (high[batch], ends[batch]):
            until += 1
        rows = slice(batch, until)
        for piece in prior.read(rows, high[batch], ends[batch]):
            if piece.present is None:
                state.add(rows, *unmasked_partial(q[rows], piece.k, piece.v, scale))
            else:
                visible = piece.present[:, :, None, :].expand(-1, -1, q.shape[2], -1)
                state.add(rows, *masked_partial(q[rows], piece.k, piece.v, visible, scale))
        batch = until
    for row in range(len(ends)):
        start = low[row]
        for piece in prior.read(slice(row, row + 1), low[row], high[row]):
            slots = torch.arange(start, start := start + piece.k.shape[2])
            visible = (slots >= first[row][:, None]).to(q.device).repeat(q.shape[2] // tokens, 1)[None, None]
            if piece.present is not None:
                visible = visible & piece.present[:, :, None, :]
            rows = slice(row, row + 1)
            state.add(rows, *masked_partial(q[rows], piece.k, piece.v, visible, scale))


def attend_full_mask(state: RunningSoftmax, q: Tensor, prior: PriorCache, mask: Tensor, scale: float) -> None:
    """Merge the prior where a mask [slot, B, H, S_tkg] (bool) says what is visible."""
    for row in range(len(q)):
        rows, start = slice(row, row + 1), 0
        seen = mask[:, row].flatten(1).any(1).nonzero()[:, 0]
        stop = int(seen[-1]) + 1 if len(seen) else 0
        for piece in prior.read(rows, 0, stop, widened=True):
            visible = mask[start : start + piece.k.shape[2], rows]
            start += piece.k.shape[2]
            if piece.present is None and bool(visible.all()):
                state.add(rows, *unmasked_partial(q[rows], piece.k, piece.v, scale))
                continue
            by_row = _row_mask(visible, piece.k.shape[1])
            if piece.present is not None:
                by_row = by_row & piece.present[:, :, None, :]
            state.add(rows, *masked_partial(q[rows], piece.k, piece.v, by_row, scale))


def unmasked_partial(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every row sees every key: q [n, KVH, R, d], k, v [n, KVH, m > 0, d] to out of q's dtype and lse [n, KVH, R]."""
    if q.device.type != "cpu":
        return masked_partial(q, k, v, torch.ones((), dtype=torch.bool, device=q.device), scale)
    parts = _parts_for_threads(q, k)
    if parts == 1:
        return _fused(q, k, v, scale)
    # Few rows leave threads idle: cut the keys into parts that run side by side.
    even = k.shape[2] // parts * parts
    cut_k, cut_v = (torch.unflatten(t[0, :, :even], 1, (parts, -1)).transpose(0, 1) for t in (k, v))
    state = RunningSoftmax(q)
    for out, lse in zip(*_fused(q.expand(parts, -1, -1, -1), cut_k, cut_v, scale), strict=True):
        state.add(slice(None), out[None], lse[None])
    if even < k.shape[2]:
        state.add(slice(None), *_fused(q, k[:, :, even:], v[:, :, even:], scale))
    return state.out, state.lse


def masked_partial(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Rows see what `visible`, broadcastable to [n, KVH, R, m], says; in float32. NaN in hidden keys does not leak."""
    stat = stat_dtype(q.dtype)
    scores = (q.to(stat) @ k.to(stat).transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp_()
    values = v.to(stat)
    broken = ~values.isfinite().all(-1)
    if not bool(broken.any()):
        return weights @ values, lse
    # A weight of zero does not silence a NaN: take it out, and give it to the rows that do see it.
    out = weights @ values.masked_fill(broken[..., None], 0)
    return out.masked_fill((visible & broken[:, :, None]).any(-1, keepdim=True), torch.nan), lse


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
    return out, lse


def _parts_for_threads(q: Tensor, k: Tensor) -> int:
    threads = torch.get_num_threads()
    if threads == 1 or q.shape[0] * q.shape[1] >= threads:
        return 1
    return max(1, min(threads, k.shape[2] // SPLIT_SLOTS)) if q.shape[0] == 1 else 1


def _row_mask(mask: Tensor, kv_heads: int) -> Tensor:
    """[key, n, H, S] to [n, KVH, R, key]."""
    return mask.permute(1, 2, 3, 0).reshape(mask.shape[1], kv_heads, -1, mask.shape[0])
