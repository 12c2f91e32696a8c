"""The exchanges of decoding: KVDP trades Q heads for sequences and back, CP gathers Q heads and combines partials.

    [B, q_heads]  --KVDP-->  [B/KVDP, q_heads*KVDP]  --CP gather-->  [B/KVDP, q_heads*KVDP*CP]  attention
    [B, q_heads]  <--KVDP--  [B/KVDP, q_heads*KVDP]  <--CP combine--  unmerged partials of all heads

What goes over the wire is in Q's dtype, log-sum-exps in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from nki_parallel_attn.kernels.collectives_torch import Exchange, Round, open_rounds
from nki_parallel_attn.topology.types import KVDPCollectiveMode


class Group(NamedTuple):
    """An open round of one group, and this rank's place in it."""

    round: Round
    rank: int
    size: int


@contextmanager
def open_groups(kvdp: Exchange | None, cp: Exchange | None) -> Iterator[tuple[Group | None, Group | None]]:
    """One round of each group for the whole step, so that a failure in one also stops the ranks of the other."""
    exchanges = [exchange for exchange in (kvdp, cp) if exchange is not None]
    with open_rounds(exchanges) as rounds:
        opened = (Group(each, of.rank, of.size) for each, of in zip(rounds, exchanges, strict=True))
        yield None if kvdp is None else next(opened), None if cp is None else next(opened)


def wait_for_all(kvdp: Exchange | None, cp: Exchange | None) -> None:
    """Return once every rank of the grid has come here, within both groups' rounds; raise on all if one has failed.

    After its own row's barrier a rank knows of the row, after its column's of all rows.
    """
    for exchange in (kvdp, cp):
        if exchange is not None:
            exchange.barrier()


def heads_for_batch(q: Tensor, group: Group, mode: KVDPCollectiveMode) -> Tensor:
    """[B, h, S, d] of this rank's heads to [B/R, R*h, S, d]: all ranks' heads of this rank's sequences."""
    rows = len(q) // group.size
    if mode is KVDPCollectiveMode.ALL_GATHER_SLICE:
        return group.round.all_gather(q, dim=1)[group.rank * rows : (group.rank + 1) * rows].flatten(1, 2)
    return torch.cat(_trade(group, torch.split(q, rows), q.dtype), 1)


def batch_for_heads(out: Tensor, group: Group, mode: KVDPCollectiveMode) -> Tensor:
    """The way back: [B/R, R*h, S, d] to [B, h, S, d]."""
    heads = out.shape[1] // group.size
    if mode is KVDPCollectiveMode.ALL_GATHER_SLICE:
        gathered = group.round.all_gather(out, dim=0)
        # A copy: the result leaves the round.
        return gathered[:, :, group.rank * heads : (group.rank + 1) * heads].flatten(0, 1).clone()
    return torch.cat(_trade(group, torch.split(out, heads, 1), out.dtype), 0)


def gather_heads(q: Tensor, group: Group) -> Tensor:
    """[B, h, S, d] to [B, R*h, S, d], heads in rank order."""
    return group.round.all_gather(q, dim=1).flatten(1, 2)


def combine(out: Tensor, lse: Tensor, sink: Tensor | None, dtype: torch.dtype, group: Group | None) -> Tensor:
    """Merge the ranks' partials and hand each rank its own heads.

    Every rank learns all log-sum-exps, scales its partial to the common denominator and sends it to the heads' owner,
    who adds up. A reduce-scatter is that same movement in torch, so both of the page's modes come here.

    Args:
        out: [B, H, S, d], normalised over this rank's keys; 0 where it sees none.
        lse: [B, H, S], -inf where it sees none.
        sink: [H, 1], one logit per head that joins the denominator once over the group.
        group: None for a rank alone.

    Returns:
        [B, H/R, S, d] of `dtype`, 0 for a row that sees nothing on any rank.
    """
    if group is None:
        return (out * _share(lse, lse, sink)).to(dtype)
    total = torch.logsumexp(group.round.all_gather(lse), 0)
    scaled = out * _share(lse, total, sink)
    parts = _trade(group, torch.split(scaled, out.shape[1] // group.size, 1), dtype)
    merged = parts[0].to(out.dtype, copy=True)
    for part in parts[1:]:
        merged += part
    return merged.to(dtype)


def _trade(group: Group, outgoing: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Send outgoing[r] to rank r, rounded to `dtype`; what came from each rank, valid until the round ends."""
    outbox = group.round.outbox(outgoing[0].shape, dtype)
    for slot, part in zip(outbox, outgoing, strict=True):
        slot.copy_(part)
    (parts,) = group.round.all_to_all(outbox)
    return parts


def _share(lse: Tensor, total: Tensor, sink: Tensor | None) -> Tensor:
    """[B, H, S, 1]: what a partial with `lse` weighs among keys whose log-sum-exp is `total`, and the sink."""
    if sink is not None:
        total = torch.logaddexp(total, sink.to(total.dtype)[None])
    # A row that sees nothing anywhere: exp(-inf - -inf) would be NaN.
    return (lse - total.masked_fill(total == -torch.inf, 0)).exp()[..., None]
