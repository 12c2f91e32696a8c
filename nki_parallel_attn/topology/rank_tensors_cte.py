"""The tensors that attention_kv_parallel_segmented_cte asks each rank for, from a bound layout and a query position.

One function per parameter of the reference page, under its name. `rank` is the index within the KV-parallel group and
`q_pos` the global position of the call's first Q token. The page knows two layouts: Contiguous, and RoundRobin, which
it turns on with kvp_group_size > 0. block_tables is made in block_tables.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.topology.kv_layout import BoundLayout, ContiguousShards

INT32_MAX = torch.iinfo(torch.int32).max


def kvp_q_offset(layout: BoundLayout, rank: int, q_pos: int) -> Tensor:
    """[1, 1] int32: q_pos under RoundRobin; q_pos - rank*local_length under Contiguous.

    In the contiguous form local slot j is visible to Q token t iff j <= kvp_q_offset + t, so the offset is negative on
    ranks whose shard starts after the query.

    Raises:
        ArgumentError: a rank outside the group, q_pos negative or an offset outside int32, a layout the page lacks.
    """
    _check(layout, rank, q_pos)
    offset = q_pos - rank * layout.local_length if isinstance(layout, ContiguousShards) else q_pos
    if offset < -INT32_MAX - 1:
        raise ArgumentError("kvp_q_offset", offset, "a value that fits in int32")
    return _int32(offset)


def global_q_offset(q_pos: int, apc_mode: bool = False) -> int:
    """The compile-time position of Q token 0: q_pos, or 0 in apc_mode, where the prior length is a run-time value."""
    _check_position(q_pos)
    return 0 if apc_mode else q_pos


def kvp_rank_id(layout: BoundLayout, rank: int) -> Tensor:
    """[1, 1] int32: the rank's index within its KV-parallel group.

    Raises:
        ArgumentError: a rank outside the group.
    """
    _check(layout, rank, 0)
    return _int32(rank)


def kvp_group_size(layout: BoundLayout) -> int:
    """The number of ranks under RoundRobin, 0 under Contiguous: what turns the page's interleaved KV mode on.

    Raises:
        ArgumentError: a layout the page lacks.
    """
    _check(layout, 0, 0)
    return 0 if isinstance(layout, ContiguousShards) else layout.ranks


def valid_num_prior_tokens(layout: BoundLayout, rank: int, q_pos: int) -> Tensor:
    """[1, 1] int32: local tokens in blocks that lie wholly at or before q_pos; a multiple of block_size.

    Needed in apc_mode, which exists under RoundRobin only. A sliding window does not reduce it.

    Raises:
        ArgumentError: a layout that is not RoundRobin, a rank outside the group, q_pos negative or beyond int32.
    """
    _check(layout, rank, q_pos)
    if isinstance(layout, ContiguousShards):
        raise ArgumentError("layout", layout, "RoundRobin", "apc_mode needs kvp_group_size > 0")
    return _int32(layout.visible_blocks(rank, q_pos) * layout.block_size)


def _check(layout: BoundLayout, rank: int, q_pos: int) -> None:
    if not isinstance(layout, ContiguousShards) and layout.interleave != layout.block_size:
        raise ArgumentError(
            "layout", layout, "Contiguous or RoundRobin", "attention_kv_parallel_segmented_cte deals whole blocks"
        )
    if not 0 <= rank < layout.ranks:
        raise ArgumentError("rank", rank, f"an index within the group, 0 to {layout.ranks - 1}")
    _check_position(q_pos)


def _check_position(q_pos: int) -> None:
    if isinstance(q_pos, bool) or not isinstance(q_pos, int) or not 0 <= q_pos <= INT32_MAX:
        raise ArgumentError("q_pos", repr(q_pos), f"an integer position, 0 to {INT32_MAX}")


def _int32(value: int) -> Tensor:
    return torch.tensor([[value]], dtype=torch.int32)
