"""Slot mappings of a paged KV cache: where a rank writes the K and V of the positions it owns.

A physical token slot is block*block_size + offset. A position that the rank does not own, and padding (position -1),
map to -1, the skip value of serving stacks; `kv_cache_update_idx` in rank_tensors_tkg.py turns it into uint32 maximum,
the skip value of attention_block_tkg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.topology.block_tables import ABSENT
from nki_parallel_attn.topology.kv_layout import BoundLayout

SKIP_SLOT = -1
PADDING = -1


def owned_positions(layout: BoundLayout, rank: int, start: int, stop: int) -> Tensor:
    """Positions in [start, stop) that `rank` holds, ascending, int64: what it projects and stores of a chunk."""
    if not 0 <= start <= stop:
        raise ArgumentError("start, stop", f"{start}, {stop}", "0 <= start <= stop")
    first, last = layout.filled_slots(rank, start), layout.filled_slots(rank, stop)
    return layout.position(rank, torch.arange(first, last))


def local_slots(layout: BoundLayout, rank: int, positions: Tensor) -> Tensor:
    """Local slot of each position on `rank`, int64; -1 for positions of other ranks and for padding (-1)."""
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ArgumentTypeError("positions", positions.dtype, "an integer dtype")
    if not 0 <= rank < layout.ranks:
        raise ArgumentError("rank", rank, f"an index within the group, 0 to {layout.ranks - 1}")
    positions = positions.to(torch.int64)
    if positions.numel() and int(positions.min()) < PADDING:
        raise ArgumentError("positions", int(positions.min()), "positions of at least 0, or -1 for padding")
    real = positions.clamp(min=0)
    mine = (positions != PADDING) & (layout.owner(real) == rank)
    return torch.where(mine, layout.slot(real), SKIP_SLOT)


def slot_mapping(layout: BoundLayout, rank: int, positions: Tensor, block_table: Tensor) -> Tensor:
    """Physical token slot of each position, -1 where `rank` writes nothing.

    Args:
        layout, rank: the bound layout and the rank's index within its group.
        positions: [T] of one sequence, or [B, T]; global positions, -1 for padding.
        block_table: [1, max_blocks] (or [max_blocks]) for [T], [B, max_blocks] for [B, T]: the rank's local blocks.

    Returns:
        int64, the shape of `positions`: block_table[slot // block_size]*block_size + slot % block_size.

    Raises:
        ArgumentTypeError: positions that are not integers.
        ArgumentError: shapes that do not fit each other, a position below -1 or beyond the layout, an owned position
            whose block is absent or beyond the table, or two positions that would be written to one slot.
    """
    if block_table.is_floating_point() or block_table.is_complex() or block_table.dtype == torch.bool:
        raise ArgumentTypeError("block_table", block_table.dtype, "an integer dtype")
    rows = positions if positions.ndim == 2 else positions[None]
    tables = block_table if block_table.ndim == 2 else block_table[None]
    if rows.ndim != 2 or tables.ndim != 2 or len(rows) != len(tables):
        raise ArgumentError(
            "block_table", tuple(block_table.shape), f"one row per sequence of positions {tuple(positions.shape)}"
        )
    slots = local_slots(layout, rank, rows)
    blocks = _blocks_of(rows, slots, tables.to(torch.int64), layout.block_size)
    physical = torch.where(slots == SKIP_SLOT, SKIP_SLOT, blocks * layout.block_size + slots % layout.block_size)
    check_slots(physical)
    return physical.reshape(positions.shape)


def per_head_slots(slots: Tensor, kv_heads: int, block_size: int) -> Tensor:
    """Spread token slots [B, T] to [B, kv_heads, T]: entry*block_size + offset with entry = block*kv_heads + head."""
    token_slots = slots.to(torch.int64)[:, None, :]
    entries = token_slots // block_size * kv_heads + torch.arange(kv_heads, device=slots.device)[:, None]
    return torch.where(token_slots == SKIP_SLOT, SKIP_SLOT, entries * block_size + token_slots % block_size)


def check_slots(slots: Tensor, num_slots: int | None = None, *, distinct: bool = True, argument: str = "slots") -> None:
    """Raise unless the slots are -1 or in range (below `num_slots` where given) and, if `distinct`, none comes twice.

    Raises:
        ArgumentError: names the index and the value.
    """
    flat = slots.reshape(-1)
    wrong = flat < SKIP_SLOT if num_slots is None else (flat < SKIP_SLOT) | (flat >= num_slots)
    if wrong.any():
        index = int(wrong.nonzero()[0])
        limit = "" if num_slots is None else f" and below {num_slots}"
        raise ArgumentError(
            f"{argument}{_unravel(index, slots)}", int(flat[index]), f"-1 or a slot of at least 0{limit}"
        )
    if not distinct:
        return
    order = flat.sort(stable=True)
    again = (order.values[1:] == order.values[:-1]) & (order.values[1:] != SKIP_SLOT)
    if again.any():
        first = int(again.nonzero()[0])
        one, two = (_unravel(int(order.indices[i]), slots) for i in (first, first + 1))
        raise ArgumentError(
            f"{argument}{two}", int(order.values[first]), f"another slot than {argument}{one}: two tokens, one slot"
        )


def _blocks_of(positions: Tensor, slots: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """Physical block of each local slot; 0 where the slot is skipped."""
    logical = slots.clamp(min=0) // block_size
    inside = logical < tables.shape[1]
    if tables.shape[1]:
        blocks = tables.gather(1, logical.clamp(max=tables.shape[1] - 1))
    else:
        blocks = torch.full_like(logical, ABSENT)
    missing = (slots != SKIP_SLOT) & (~inside | (blocks < 0))
    if missing.any():
        row, column = missing.nonzero()[0].tolist()
        raise ArgumentError(
            f"block_table[{row}, {int(logical[row, column])}]",
            "absent" if inside[row, column] else f"a table of {tables.shape[1]} blocks",
            f"a block for position {int(positions[row, column])}, which this rank holds",
        )
    return torch.where(slots == SKIP_SLOT, 0, blocks)


def _unravel(index: int, like: Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(index), like.shape)]
