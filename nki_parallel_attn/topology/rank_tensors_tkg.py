"""The tensors that attention_block_tkg asks each rank for, from one description of the step (decode_rank.py).

One function per parameter of the reference page, under its name. All take the whole batch and return this rank's part,
so that what is wrong anywhere raises on every rank. Masks are made in masks.py, active_blocks_table in block_tables.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.topology.decode_rank import DecodeRank, check_positions
from nki_parallel_attn.topology.kv_layout import BoundLayout
from nki_parallel_attn.topology.slot_mapping import PADDING, SKIP_SLOT, check_slots, per_head_slots, slot_mapping

SKIP_UPDATE_IDX = torch.iinfo(torch.uint32).max


def kvdp_rank(rank: DecodeRank) -> Tensor:
    """`KVDP_rank`: [1] uint32, the index within the KVDP group."""
    return torch.tensor([rank.kvdp_rank], dtype=torch.uint32)


def pos_ids(rank: DecodeRank, positions: Tensor) -> Tensor:
    """`pos_ids`: [B/KVDP, S_tkg] int32, the local slots that the positions before each active token fill.

    Without CP that is the token's absolute position. The prior of row b is local slots [0, pos_ids[b, 0]). Padding: 0.

    Raises:
        ArgumentTypeError, ArgumentError: as `check_positions`; a local length beyond int32.
    """
    return _filled(rank, rank.own_positions(positions))


def swa_start_pos_ids(rank: DecodeRank, positions: Tensor, sliding_window: int) -> Tensor:
    """`swa_start_pos_ids`: [B/KVDP, S_tkg] int32, the first local slot in each query's window.

    Args:
        positions: [B, S_tkg] of the queries; for a tree of speculative tokens their depths, siblings sharing one.
        sliding_window: W > 0 tokens, the query's own included: global positions [p - W + 1, p].

    Raises:
        ArgumentTypeError, ArgumentError: as `check_positions`; sliding_window below 1.
    """
    if sliding_window < 1:
        raise ArgumentError(
            "sliding_window", sliding_window, "at least 1", "without a window pass no swa_start_pos_ids"
        )
    own = rank.own_positions(positions)
    return _filled(rank, torch.where(own == PADDING, PADDING, (own - sliding_window + 1).clamp(min=0)))


def max_context_len(rank: DecodeRank, positions: Tensor) -> Tensor:
    """`max_context_len`: [1] int32, the longest prior on this rank in local slots."""
    return pos_ids(rank, positions)[:, 0].max().reshape(1)


def s_ctx(layout: BoundLayout, positions: Tensor) -> int:
    """`S_ctx`: the smallest local context, in whole blocks, that holds priors and active tokens on every rank.

    Under Contiguous it is the local length, for a shard is one piece.

    Raises:
        ArgumentTypeError, ArgumentError: as `check_positions`; a position beyond the layout.
    """
    return layout.local_slots(int(check_positions(positions).max()) + 1)


def flat_kv_cache_update_idx(rank: DecodeRank, positions: Tensor, s_max_ctx: int) -> Tensor:
    """`kv_cache_update_idx` of a flat cache: [B/KVDP, 1] uint32, the local slot where row b's S_tkg tokens start.

    uint32 maximum (skip) on ranks that do not own the row's tokens, and for rows of padding.

    Args:
        positions: [B, S_tkg]; each row consecutive, as the page assumes, or all padding.
        s_max_ctx: local length of the cache.

    Raises:
        ArgumentTypeError, ArgumentError: as `check_positions`; a row that is not consecutive or padded in part; a row
            whose tokens have different owners, which only a block cache can hold; a slot beyond the cache.
    """
    positions = check_positions(positions)
    padded = positions[:, :1] == PADDING
    steps = torch.arange(positions.shape[1], device=positions.device)
    wrong = ~padded & (positions != positions[:, :1] + steps)
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise ArgumentError(f"positions[{row}]", positions[row].tolist(), "consecutive positions for a flat cache")
    real = positions.clamp(min=0)
    owners = rank.layout.owner(real)
    split = ~padded & (owners != owners[:, :1])
    if split.any():
        row = int(split.nonzero()[0, 0])
        raise ArgumentError(
            f"positions[{row}]",
            f"{positions[row].tolist()} owned by CP ranks {owners[row].tolist()}",
            "active tokens of one owner",
            "a flat cache has one start index per sequence: use block KV",
        )
    start = torch.where(padded, SKIP_SLOT, rank.layout.slot(real[:, :1]))
    beyond = ~padded & (start + positions.shape[1] > s_max_ctx)
    if beyond.any():
        row = int(beyond.nonzero()[0, 0])
        raise ArgumentError(
            f"positions[{row}]",
            f"local slots {int(start[row])} to {int(start[row]) + positions.shape[1] - 1}",
            f"slots below s_max_ctx={s_max_ctx}",
        )
    mine = torch.where(owners[:, :1] == rank.cp_rank, start, SKIP_SLOT)
    return _update_idx(mine[rank.batch_rows(len(positions))])


def block_kv_cache_update_idx(rank: DecodeRank, positions: Tensor, block_table: Tensor, kv_heads: int = 1) -> Tensor:
    """`kv_cache_update_idx` of a block cache: the physical slot of each active token, uint32 maximum to skip.

    Args:
        positions: [B, S_tkg], the whole batch.
        block_table: [B/KVDP, max_blocks], block numbers (not per head) of this rank's sequences.
        kv_heads: KV heads in the cache.

    Returns:
        uint32 [B/KVDP, S_tkg], or [B/KVDP, kv_heads, S_tkg] of (block*kv_heads + head)*block_len + offset.

    Raises:
        ArgumentTypeError, ArgumentError: as `check_positions` and `slot_mapping`; two tokens that share a slot, in one
            sequence or in two.
    """
    slots = slot_mapping(rank.layout, rank.cp_rank, rank.own_positions(positions), block_table)
    return _update_idx(slots if kv_heads == 1 else per_head_slots(slots, kv_heads, rank.layout.block_size))


def group_sink(sink: Tensor, group: int, groups: int) -> Tensor:
    """`sink`: [q_heads_attn, 1] of the Q heads that KV group `group` gathers, from the model copy's sinks.

    The gathered heads, in the order cp*(q_heads*KVDP) + kvdp*q_heads + h, are consecutive heads of the model, so every
    rank of the group takes the same slice; the operation counts it once over the group.

    Args:
        sink: [heads] or [heads, 1], one logit per Q head of the model copy.
        group, groups: index and number of KV groups in the copy.

    Raises:
        ArgumentError: another shape, heads that `groups` does not divide, a group out of range.
    """
    if sink.ndim not in (1, 2) or sink.shape[1:].numel() != 1:
        raise ArgumentError("sink", tuple(sink.shape), "[q_heads] or [q_heads, 1] of the model copy")
    if groups < 1 or len(sink) % groups or not 0 <= group < groups:
        raise ArgumentError(
            "group", f"{group} of {groups}", f"an index below a number of groups that divides {len(sink)}"
        )
    heads = len(sink) // groups
    return sink.reshape(-1, 1)[group * heads : (group + 1) * heads]


def _filled(rank: DecodeRank, positions: Tensor) -> Tensor:
    """Local slots filled before each position as int32; 0 for padding."""
    filled = rank.layout.filled_slots(rank.cp_rank, positions.clamp(min=0))
    if int(filled.max()) > torch.iinfo(torch.int32).max:
        raise ArgumentError("positions", int(positions.max()), "positions whose local slot fits in int32")
    return torch.where(positions == PADDING, 0, filled).to(torch.int32)


def _update_idx(slots: Tensor) -> Tensor:
    check_slots(slots, SKIP_UPDATE_IDX, distinct=False, argument="kv_cache_update_idx")
    return torch.where(slots == SKIP_SLOT, SKIP_UPDATE_IDX, slots).to(torch.uint32)
