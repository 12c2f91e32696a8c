"""The exchanges of decoding: KVDP trades Q heads for sequences and back, CP gathers Q heads and combines partials.

    [B, q_heads]  --KVDP-->  [B/KVDP, q_heads*KVDP]  --CP gather-->  [B/KVDP, q_heads*KVDP*CP]  attention
    [B, q_heads]  <--KVDP--  [B/KVDP, q_heads*KVDP]  <--CP combine--  unmerged partials of all heads

What goes over the wire is in Q's dtype, log-sum-exps in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.kernels.collectives_torch import Exchange
from nki_parallel_attn.topology.types import KVDPCollectiveMode


def heads_for_batch(q: Tensor, exchange: Exchange, mode: KVDPCollectiveMode) -> Tensor:
    """[B, h, S, d] of this rank's heads to [B/R, R*h, S, d]: all ranks' heads of this rank's sequences."""
    rows = len(q) // exchange.size
    with exchange.round() as opened:
        if mode is KVDPCollectiveMode.ALL_GATHER_SLICE:
            gathered = opened.all_gather(q, dim=1)[exchange.rank * rows : (exchange.rank + 1) * rows]
            return gathered.flatten(1, 2).clone()
        outbox = opened.outbox((rows, *q.shape[1:]), q.dtype)
        for slot, part in zip(outbox, torch.split(q, rows), strict=True):
            slot.copy_(part)
        (parts,) = opened.all_to_all(outbox)
        return torch.cat(parts, 1)


def batch_for_heads(out: Tensor, exchange: Exchange, mode: KVDPCollectiveMode) -> Tensor:
    """The way back: [B/R, R*h, S, d] to [B, h, S, d]."""
    heads = out.shape[1] // exchange.size
    with exchange.round() as opened:
        if mode is KVDPCollectiveMode.ALL_GATHER_SLICE:
            gathered = opened.all_gather(out, dim=0)
            return gathered[:, :, exchange.rank * heads : (exchange.rank + 1) * heads].flatten(0, 1).clone()
        outbox = opened.outbox((out.shape[0], heads, *out.shape[2:]), out.dtype)
        for slot, part in zip(outbox, torch.split(out, heads, 1), strict=True):
            slot.copy_(part)
        (parts,) = opened.all_to_all(outbox)
        return torch.cat(parts, 0)


def gather_heads(q: Tensor, exchange: Exchange) -> Tensor:
    """[B, h, S, d] to [B, R*h, S, d], heads in rank order."""
    return exchange.all_gather(q, dim=1).flatten(1, 2)


def combine(out: Tensor, lse: Tensor, sink: Tensor | None, dtype: torch.dtype, exchange: Exchange | None) -> Tensor:
    """Merge the ranks' partials and hand each rank its own heads.

    Every rank learns all log-sum-exps, scales its partial to the common denominator and sends it to the heads' owner,
    who adds up. A reduce-scatter is that same movement in torch, so both of the page's modes come here.

    Args:
        out: [B, H, S, d], normalised over this rank's keys; 0 where it sees none.
        lse: [B, H, S], -inf where it sees none.
        sink: [H, 1], one logit per head that joins the denominator once over the group.
        exchange: None for a rank alone.

    Returns:
        [B, H/R, S, d] of `dtype`, 0 for a row that sees nothing on any rank.
    """
    if exchange is None:
        return (out * _share(lse, lse, sink)).to(dtype)
    heads = out.shape[1] // exchange.size
    with exchange.round() as opened:
        total = torch.logsumexp(opened.all_gather(lse), 0)
        scaled = out * _share(lse, total, sink)
        outbox = opened.outbox((out.shape[0], heads, *out.shape[2:]), dtype)
        for slot, part in zip(outbox, torch.split(scaled, heads, 1), strict=True):
            slot.copy_(part)
        (parts,) = opened.all_to_all(outbox)
        merged = parts[0].to(out.dtype, copy=True)
        for part in parts[1:]:
            merged += part
        return merged.to(dtype)


def _share(lse: Tensor, total: Tensor, sink: Tensor | None) -> Tensor:
    """[B, H, S, 1]: what a partial with `lse` weighs among keys whose log-sum-exp is `total`, and the sink."""
    if sink is not None:
        total = torch.logaddexp(total, sink.to(total.dtype)[None])
    # A row that sees nothing anywhere: exp(-inf - -inf) would be NaN.
    return (lse - total.masked_fill(total == -torch.inf, 0)).exp()[..., None]
