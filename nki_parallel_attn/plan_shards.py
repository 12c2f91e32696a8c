"""Whole Q, K and V tensors and the ranks' shards of them, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError

if TYPE_CHECKING:
    from nki_parallel_attn.plan import ShardingPlan
    from nki_parallel_attn.plan_rank import RankView


def shard_q(view: RankView, q: Tensor) -> Tensor:
    """[..., q_heads, S, d] to a view [..., q_heads_per_rank, S, d]."""
    _check_heads("q", q, "q_heads", view.plan.shape.q_heads)
    return q[..., view.q_heads.start : view.q_heads.stop, :, :]


def unshard_q(plan: ShardingPlan, shards: Sequence[Tensor]) -> Tensor:
    """One model copy's [..., q_heads_per_rank, S, d], by rank, to [..., q_heads, S, d]."""
    _check_shards(plan, shards)
    by_head = sorted(range(plan.tp), key=lambda rank: plan.rank(rank).q_heads.start)
    return torch.cat([shards[rank] for rank in by_head], dim=-3)


def shard_kv(view: RankView, kv: Tensor, paged: bool) -> Tensor:
    """[(B,) kv_heads, S, d] to the rank's cache; see `RankView.shard_kv`."""
    plan = view.plan
    _check_kv(view, "kv", kv)
    if kv.ndim == 4:
        kv = kv[view.batch_slice(len(kv))]
    length = plan.length(kv.shape[-2])
    owned = view.owned_positions(0, length).to(kv.device)
    spare = plan.layout.local_slots(length) - len(owned)
    local = _movable(kv)[..., view.kv_heads.start : view.kv_heads.stop, :, :].index_select(-2, owned)
    local = torch.nn.functional.pad(local, (0, 0, 0, spare))
    if local.dtype != kv.dtype:
        local = local.view(kv.dtype)
    return _to_blocks(local, plan.block_size) if paged else local


def unshard_kv(view: RankView, local: Tensor, whole: Tensor, paged: bool) -> Tensor:
    """Write the rank's cache to its place in `whole`; see `RankView.unshard_kv`."""
    plan = view.plan
    _check_kv(view, "whole", whole)
    length = plan.length(whole.shape[-2])
    part = whole[view.batch_slice(len(whole))] if whole.ndim == 4 else whole
    slots = plan.layout.local_slots(length)
    lead, tail = part.shape[:-3], (plan.kv_heads_per_rank, slots, whole.shape[-1])
    blocks = (lead.numel() * slots // plan.block_size, tail[0], plan.block_size, tail[2])
    expected = blocks if paged else (*lead, *tail)
    if tuple(local.shape) != expected:
        raise ArgumentError("local", tuple(local.shape), f"{expected}, rank {view.rank}'s part of {tuple(whole.shape)}")
    owned = view.owned_positions(0, length).to(whole.device)
    flat = _to_flat(local, lead) if paged else local
    heads = _movable(part)[..., view.kv_heads.start : view.kv_heads.stop, :, :]
    heads[..., owned, :] = _movable(flat)[..., : len(owned), :]
    return whole


def unshard_kv_all(plan: ShardingPlan, shards: Sequence[Tensor], length: int, batch: int | None, paged: bool) -> Tensor:
    """One model copy's caches, by rank, to [(batch,) kv_heads, length, d]."""
    _check_shards(plan, shards)
    lead = () if batch is None else (batch,)
    whole = shards[0].new_zeros(*lead, plan.shape.kv_heads, length, shards[0].shape[-1])
    for rank in range(plan.tp):
        unshard_kv(plan.rank(rank), shards[rank], whole, paged)
    return whole


def _to_blocks(local: Tensor, block_size: int) -> Tensor:
    """[(B,) heads, slots, d] to [(B *) blocks, heads, block_size, d]."""
    *lead, heads, slots, head_dim = local.shape
    blocked = local.reshape(*lead, heads, slots // block_size, block_size, head_dim).transpose(-4, -3)
    # Contiguous, as the operations ask of a cache: where sizes allow it, reshape leaves the transposed view.
    return blocked.reshape(-1, heads, block_size, head_dim).contiguous()


def _to_flat(cache: Tensor, lead: torch.Size) -> Tensor:
    """The inverse of `_to_blocks`, `lead` being (B,) or ()."""
    count, heads, block_size, head_dim = cache.shape
    blocked = cache.reshape(*lead, count // lead.numel(), heads, block_size, head_dim)
    return blocked.transpose(-4, -3).flatten(-3, -2)


def _movable(tensor: Tensor) -> Tensor:
    """float8 as its bytes: torch moves float8 with few of its operations."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _check_heads(argument: str, tensor: Tensor, name: str, heads: int) -> None:
    if tensor.ndim not in (3, 4) or tensor.shape[-3] != heads:
        expected = f"[{name}, S, d] or [B, {name}, S, d] with {name}={heads}"
        raise ArgumentError(argument, tuple(tensor.shape), expected)


def _check_kv(view: RankView, argument: str, kv: Tensor) -> None:
    _check_heads(argument, kv, "kv_heads", view.plan.shape.kv_heads)
    if kv.ndim == 3 and view.plan.kvdp > 1:
        raise ArgumentError(argument, tuple(kv.shape), f"[B, kv_heads, S, d], for kvdp={view.plan.kvdp} divides B")


def _check_shards(plan: ShardingPlan, shards: Sequence[Tensor]) -> None:
    if len(shards) not in (plan.tp, plan.world_size):
        raise ArgumentError("shards", f"{len(shards)} tensors", f"{plan.tp} (tp) or {plan.world_size} (world_size)")
