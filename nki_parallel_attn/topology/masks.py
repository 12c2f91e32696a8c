"""Attention masks of attention_block_tkg, per rank: uint8, 1 = visible.

Layouts: [key, B, head, query], or with is_qk_swapped [B, head, query, key]. The last S_tkg keys of a full mask are the
step's active tokens; the keys before them are local cache slots in sequence order, for flat and for block caches alike
(the reference kernel wants them permuted for block caches). Under CP the active keys are visible on their owner alone,
so that each counts once over the group.

A padded active token (position -1) sees and is seen by itself only, on CP rank 0: its output means nothing, but a row
without any visible key would have no softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.topology.decode_rank import DecodeRank, check_positions
from nki_parallel_attn.topology.kv_layout import BoundLayout
from nki_parallel_attn.topology.slot_mapping import PADDING


def active_mask(
    rank: DecodeRank, positions: Tensor, q_heads_attn: int, *, tree: Tensor | None = None, sliding_window: int = 0
) -> Tensor:
    """`attention_mask` where pos_ids is given: the active part, [S_tkg, B/KVDP, q_heads_attn, S_tkg] uint8.

    Args:
        positions: [B, S_tkg] of the whole batch, see decode_rank.py.
        q_heads_attn: heads of the gathered Q, q_heads*KVDP*CP.
        tree: [S_tkg, B, 1 or q_heads_attn, S_tkg] (key, batch, head, query), which active tokens see which; taken as
            given. Without it token j is visible to query s iff j <= s and, with a window, positions[s] -
            positions[j] < W.
        sliding_window: W tokens, the query's own included; 0 for none.

    Raises:
        ArgumentTypeError, ArgumentError: as `check_positions`; a tree of another shape.
    """
    own = rank.own_positions(positions)
    tokens = positions.shape[1]
    if tree is None:
        index = torch.arange(tokens, device=own.device)
        visible = (index[:, None] <= index)[:, None, :]
        if sliding_window:
            visible = visible & (own[None] - own.T[:, :, None] < sliding_window)
        visible = visible.expand(tokens, len(own), tokens)[:, :, None, :]
    else:
        if tree.ndim != 4 or tree.shape[:2] != (tokens, len(positions)) or tree.shape[3] != tokens:
            raise ArgumentError(
                "tree", tuple(tree.shape), f"[{tokens}, {len(positions)}, 1 or {q_heads_attn}, {tokens}]"
            )
        visible = tree[:, rank.batch_rows(len(positions))] != 0
    return _expand_heads(_gate_active(rank, own, visible), q_heads_attn, "tree")


def full_mask(
    rank: DecodeRank,
    positions: Tensor,
    q_heads_attn: int,
    s_ctx: int,
    *,
    tree: Tensor | None = None,
    sliding_window: int = 0,
    is_qk_swapped: bool = False,
) -> Tensor:
    """`attention_mask` where pos_ids is None: causal (or windowed) prior and active part for this rank's slots.

    Args:
        positions, q_heads_attn, tree, sliding_window: as `active_mask`. The window of the prior counts from positions.
        s_ctx: local context length of the bucket, the active tokens' S_tkg rows included.

    Returns:
        uint8 [s_ctx, B/KVDP, q_heads_attn, S_tkg], swapped [B/KVDP, q_heads_attn, S_tkg, s_ctx].

    Raises:
        ArgumentTypeError, ArgumentError: as `active_mask`; a bucket in which some rank of the group has no row left for
            the active tokens (a completely full shard): names the bucket that fits.
    """
    own = rank.own_positions(positions)
    tokens = own.shape[1]
    _check_bucket(rank.layout, max(int(positions[:, 0].max()), 0), tokens, s_ctx)
    first_query = own[:, :1].clamp(min=0)
    start = (own - sliding_window + 1).clamp(min=0) if sliding_window else torch.zeros_like(own)
    end = rank.layout.filled_slots(rank.cp_rank, first_query)
    slots = torch.arange(s_ctx - tokens, device=own.device)[:, None, None]
    prior = (slots >= rank.layout.filled_slots(rank.cp_rank, start)) & (slots < end) & (own != PADDING)
    active = active_mask(rank, positions, q_heads_attn, tree=tree, sliding_window=sliding_window)
    mask = torch.cat([_expand_heads(prior[:, :, None, :], q_heads_attn, "prior"), active])
    return swap_qk(mask) if is_qk_swapped else mask


def shard_full_mask(
    rank: DecodeRank, mask: Tensor, positions: Tensor, s_ctx: int, *, is_qk_swapped: bool = False
) -> Tensor:
    """One rank's part of any global full mask, such as one with padding or gaps in the prior.

    Args:
        mask: global, [S + S_tkg, B, q_heads_attn, S_tkg] (swapped [B, q_heads_attn, S_tkg, S + S_tkg]): key p < S is
            position p, the last S_tkg keys are the active tokens; q_heads_attn as in `active_mask`.
        positions: [B, S_tkg], which says who owns each active token.
        s_ctx: local context length of the bucket, the active tokens' S_tkg rows included.
        is_qk_swapped: the layout of `mask` and of the result.

    Returns:
        The dtype of `mask`, with s_ctx keys and B/KVDP sequences.

    Raises:
        ArgumentTypeError, ArgumentError: as `check_positions`; a mask of another shape or longer than the layout; a
            bucket too short for a key that is visible somewhere.
    """
    keys_first = mask.movedim(-1, 0) if is_qk_swapped and mask.ndim == 4 else mask
    batch, tokens = check_positions(positions).shape
    if keys_first.ndim != 4 or keys_first.shape[1] != batch or keys_first.shape[3] != tokens:
        layout = "[B, q_heads_attn, S_tkg, S + S_tkg]" if is_qk_swapped else "[S + S_tkg, B, q_heads_attn, S_tkg]"
        raise ArgumentError("mask", tuple(mask.shape), f"{layout} with B={batch}, S_tkg={tokens}")
    length = len(keys_first) - tokens
    if length < 0:
        raise ArgumentError("mask", tuple(mask.shape), f"at least S_tkg={tokens} keys")
    seen = keys_first[:length].flatten(1).any(1).nonzero()
    _check_bucket(rank.layout, int(seen[-1]) + 1 if len(seen) else 0, tokens, s_ctx)

    own_rows = rank.batch_rows(batch)
    filled = min(rank.layout.filled_slots(rank.cp_rank, length), s_ctx - tokens)
    held = rank.layout.position(rank.cp_rank, torch.arange(filled, device=mask.device))
    local = mask.new_zeros(s_ctx, own_rows.stop - own_rows.start, *keys_first.shape[2:])
    local[:filled] = keys_first[held][:, own_rows]
    own = rank.own_positions(positions).to(mask.device)
    owned = _owner(rank.layout, own) == rank.cp_rank
    local[s_ctx - tokens :] = keys_first[length:, own_rows] * owned.T[:, :, None, None]
    return swap_qk(local) if is_qk_swapped else local


def swap_qk(mask: Tensor) -> Tensor:
    """[key, B, head, query] to the Q-stationary layout [B, head, query, key]."""
    return mask.movedim(0, -1).contiguous()


def _gate_active(rank: DecodeRank, own: Tensor, visible: Tensor) -> Tensor:
    """Keep [key, B, head, query] on the keys' owner; leave padded tokens to themselves."""
    key_padded, query_padded = (own == PADDING).T[:, :, None, None], (own == PADDING)[None, :, None, :]
    itself = torch.eye(own.shape[1], dtype=torch.bool, device=own.device)[:, None, None, :]
    visible = torch.where(key_padded | query_padded, itself, visible.to(own.device))
    return visible & (_owner(rank.layout, own) == rank.cp_rank).T[:, :, None, None]


def _owner(layout: BoundLayout, positions: Tensor) -> Tensor:
    """CP rank of each active token; 0 for padding."""
    return torch.where(positions == PADDING, 0, layout.owner(positions.clamp(min=0)))


def _check_bucket(layout: BoundLayout, prior: int, tokens: int, s_ctx: int) -> None:
    """Raise unless the fullest rank has `tokens` rows left: rank 0, for in every layout slots fill there first."""
    needed = layout.filled_slots(0, prior) + tokens
    if needed > s_ctx:
        bucket = -(-needed // layout.block_size) * layout.block_size
        raise ArgumentError(
            "s_ctx",
            s_ctx,
            f"at least {needed}: {needed - tokens} prior slots on the fullest rank and S_tkg={tokens}",
            f"the bucket s_ctx={bucket} fits, or pass pos_ids instead of a full mask",
        )


def _expand_heads(mask: Tensor, q_heads_attn: int, argument: str) -> Tensor:
    if mask.shape[2] not in (1, q_heads_attn):
        raise ArgumentError(argument, tuple(mask.shape), f"1 or q_heads_attn={q_heads_attn} heads in dim 2")
    return mask.expand(-1, -1, q_heads_attn, -1).to(torch.uint8).contiguous()
