"""RankView: what one rank of a plan holds, and every tensor that a reference page asks that rank for.

The tensors carry the page's parameter names; topology/ makes them from the bound layout. Prefill methods serve
attention_kv_parallel_segmented_cte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology import block_tables, rank_tensors_cte, slot_mapping

if TYPE_CHECKING:
    from nki_parallel_attn.plan import ShardingPlan


@dataclass(frozen=True)
class RankView:
    """One rank of a plan; made by `plan.rank(r)`.

    Raises:
        ArgumentError: a rank outside the world.
    """

    plan: ShardingPlan
    rank: int

    def __post_init__(self) -> None:
        self.plan.mesh.coordinates(self.rank)

    # Where the rank stands and what it holds

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinate on each mesh axis: replica, kv_group, kvp, cp, kvdp."""
        return self.plan.mesh.coordinates(self.rank)

    @property
    def kv_group(self) -> int:
        """Number of the rank's KV group within its model copy."""
        return self.coordinates["kv_group"]

    @property
    def index(self) -> int:
        """Index within the KV group; cp_rank*kvdp + kvdp_rank when decoding."""
        return self.plan.mesh.index(self.rank, *self.plan.axes_of("kv"))

    @property
    def sequence_index(self) -> int:
        """Index among the ranks that share a sequence: the kvp or cp coordinate, which the layout calls rank."""
        return self.plan.mesh.index(self.rank, "kvp", "cp")

    @property
    def q_heads(self) -> range:
        """Global Q heads that the rank projects and gets the output of."""
        count = self.plan.q_heads_per_rank
        start = (self.kv_group * self.plan.group_size + self.index) * count
        return range(start, start + count)

    @property
    def kv_heads(self) -> range:
        """Global KV heads in the rank's cache."""
        # Also right where several groups hold the same head: group * kv_heads // groups.
        start = self.kv_group * self.plan.shape.kv_heads // self.plan.kv_groups
        return range(start, start + self.plan.kv_heads_per_rank)

    def group_ranks(self, group: str = "kv") -> tuple[int, ...]:
        """World ranks of this rank's list in `plan.replica_group(group)`, in index order."""
        return self.plan.mesh.group_of(self.rank, *self.plan.axes_of(group))

    @property
    def replica_group(self) -> ReplicaGroup:
        """Rank lists of all KV groups: `replica_groups` of attention_kv_parallel_segmented_cte."""
        return self.plan.replica_group("kv")

    @property
    def kvdp_replica_group(self) -> ReplicaGroup:
        """`KVDP_replica_group` of attention_block_tkg: ranks that share KV by batch."""
        return self.plan.replica_group("kvdp")

    @property
    def cp_replica_group(self) -> ReplicaGroup:
        """`CP_replica_group` of attention_block_tkg: ranks that share KV by sequence."""
        return self.plan.replica_group("cp")

    def tokens_held(self, length: int | None = None) -> int:
        """Tokens of a sequence of `length` (by default max_seq_len) whose KV this rank holds."""
        return self.plan.layout.filled_slots(self.sequence_index, self.plan.length(length))

    def blocks_held(self, length: int | None = None) -> int:
        """Blocks that those tokens fill or start."""
        return block_tables.blocks_needed(self.plan.layout, self.sequence_index, self.plan.length(length))

    def owned_positions(self, start: int, stop: int) -> Tensor:
        """Positions in [start, stop) whose KV this rank projects and stores, ascending, int64."""
        return slot_mapping.owned_positions(self.plan.layout, self.sequence_index, start, stop)

    def batch_slice(self, batch: int) -> slice:
        """Which of `batch` sequences the rank holds KV for: its share under kvdp, else all."""
        count = self.plan.batch_per_rank(batch)
        start = self.coordinates["kvdp"] * count
        return slice(start, start + count)

    # Paged cache

    def cache_shape(self, num_blocks: int | None = None, *, fp8_packed: bool = False) -> tuple[int, ...]:
        """Shape of one of the paged caches, K or V; `num_blocks` by default those of one sequence of max_seq_len.

        Returns:
            (num_blocks, kv_heads, block_size, head_dim), or for K with fp8_packed (num_blocks, kv_heads,
            block_size // 2, head_dim, 2).

        Raises:
            ArgumentError: no num_blocks and no max_seq_len, or an odd block_size to be packed.
        """
        blocks = self.plan.blocks_per_sequence() if num_blocks is None else num_blocks
        block_size, head_dim, heads = self.plan.block_size, self.plan.shape.head_dim, self.plan.kv_heads_per_rank
        if not fp8_packed:
            return (blocks, heads, block_size, head_dim)
        if block_size % 2:
            raise ArgumentError("block_size", block_size, "an even number for fp8_packed")
        return (blocks, heads, block_size // 2, head_dim, 2)

    def flat_cache_shape(
        self, batch: int, length: int | None = None, *, K_cache_transposed: bool = False
    ) -> tuple[int, int, int, int]:
        """Shape of a flat cache of attention_block_tkg for sequences of `length` (by default max_seq_len).

        Returns:
            (B_attn, kv_heads, S_max_ctx, head_dim), or (B_attn, kv_heads, head_dim, S_max_ctx) for a transposed K.
        """
        slots = self.plan.layout.local_slots(self.plan.length(length))
        lead = (self.plan.batch_per_rank(batch), self.plan.kv_heads_per_rank)
        head_dim = self.plan.shape.head_dim
        return (*lead, head_dim, slots) if K_cache_transposed else (*lead, slots, head_dim)

    def block_table(
        self,
        length: int,
        blocks: Sequence[int] | None = None,
        *,
        max_blocks: int | None = None,
        num_blocks: int | None = None,
    ) -> Tensor:
        """`block_tables` for a sequence of `length` tokens: [1, max_blocks] int32, -1 beyond the blocks it has.

        Args:
            length: tokens of the sequence that are or will be in the cache.
            blocks: physical block of each local block; by default 0, 1, ...
            max_blocks: width of the table; by default the same on all ranks, `plan.blocks_per_sequence(length)`.
            num_blocks: blocks in the cache; by default just enough for `blocks`.

        Raises:
            ArgumentError: fewer blocks than the rank's share needs, more than max_blocks, or one outside the cache.
        """
        needed = self.blocks_held(length)
        entries = list(range(needed)) if blocks is None else list(blocks)
        if len(entries) < needed:
            raise ArgumentError(
                "blocks", f"{len(entries)} blocks", f"{needed} for this rank's share of {length} tokens"
            )
        width = max(self.plan.blocks_per_sequence(length), len(entries)) if max_blocks is None else max_blocks
        return block_tables.block_table(entries, width, max([0, *entries]) + 1 if num_blocks is None else num_blocks)

    def slot_mapping(self, positions: Tensor, block_table: Tensor) -> Tensor:
        """Physical slot (block*block_size + offset) of each position, -1 for other ranks' positions and for -1.

        Args:
            positions: [T] or [B, T] integers, global.
            block_table: [1, max_blocks] or [B, max_blocks]; the rank's local blocks.
        """
        return slot_mapping.slot_mapping(self.plan.layout, self.sequence_index, positions, block_table)

    # attention_kv_parallel_segmented_cte

    def kvp_q_offset(self, q_pos: int) -> Tensor:
        """[1, 1] int32: causal offset of this rank for a call whose first Q token is at position q_pos."""
        return rank_tensors_cte.kvp_q_offset(self.plan.layout, self.sequence_index, q_pos)

    def kvp_rank_id(self) -> Tensor:
        """[1, 1] int32: index within the KV-parallel group."""
        return rank_tensors_cte.kvp_rank_id(self.plan.layout, self.sequence_index)

    def kvp_group_size(self) -> int:
        """Ranks of the group under RoundRobin, 0 under Contiguous."""
        return rank_tensors_cte.kvp_group_size(self.plan.layout)

    def global_q_offset(self, q_pos: int, *, apc_mode: bool = False) -> int:
        """q_pos, or 0 in apc_mode."""
        return rank_tensors_cte.global_q_offset(q_pos, apc_mode)

    def valid_num_prior_tokens(self, q_pos: int) -> Tensor:
        """[1, 1] int32: local tokens in blocks wholly at or before q_pos, for apc_mode."""
        return rank_tensors_cte.valid_num_prior_tokens(self.plan.layout, self.sequence_index, q_pos)

    def kvp_arguments(self, q_pos: int, *, apc_mode: bool = False) -> dict[str, Any]:
        """Every argument of attention_kv_parallel_segmented_cte that the plan determines, under the page's names.

        What is left to the caller: q, k_cache, v_cache, block_tables, and what the model decides (scale,
        sliding_window, fp8, tp_out).
        """
        return {
            "kvp_q_offset": self.kvp_q_offset(q_pos),
            "replica_groups": self.replica_group,
            "group_size": self.plan.group_size,
            "block_size": self.plan.block_size,
            "seg_size": self.plan.seg_size,
            "global_q_offset": self.global_q_offset(q_pos, apc_mode=apc_mode),
            "kvp_rank_id": self.kvp_rank_id(),
            "kvp_group_size": self.kvp_group_size(),
            "apc_mode": apc_mode,
            "valid_num_prior_tokens": self.valid_num_prior_tokens(q_pos) if apc_mode else None,
        }

    # Global tensors and this rank's shards

    def shard_q(self, q: Tensor) -> Tensor:
        """This rank's Q heads of [..., q_heads, S, d]: a view [..., q_heads_per_rank, S, d]."""
        self._check_heads("q", q, self.plan.shape.q_heads)
        return q[..., self.q_heads.start : self.q_heads.stop, :, :]

    def shard_kv(self, kv: Tensor, *, paged: bool = True) -> Tensor:
        """This rank's part of a global K or V, with zeros in the slots that are left over.

        Args:
            kv: [kv_heads, S, d], or [B, kv_heads, S, d] of which kvdp keeps a part; positions 0 .. S-1.
            paged: as blocks, each sequence's in order; else flat.

        Returns:
            [B_attn * blocks, kv_heads_per_rank, block_size, d], or flat [(B_attn,) kv_heads_per_rank, slots, d].
            Differentiable.
        """
        self._check_heads("kv", kv, self.plan.shape.kv_heads)
        if kv.ndim == 4:
            kv = kv[self.batch_slice(len(kv))]
        length = self.plan.length(kv.shape[-2])
        owned = self.owned_positions(0, length).to(kv.device)
        spare = self.plan.layout.local_slots(length) - len(owned)
        local = _movable(kv)[..., self.kv_heads.start : self.kv_heads.stop, :, :].index_select(-2, owned)
        local = torch.nn.functional.pad(local, (0, 0, 0, spare))
        if local.dtype != kv.dtype:
            local = local.view(kv.dtype)
        return self._to_blocks(local) if paged else local

    def unshard_kv(self, local: Tensor, whole: Tensor, *, paged: bool = True) -> Tensor:
        """Write this rank's shard, as `shard_kv` makes it, to its place in `whole`; returns `whole`.

        Args:
            local: the shard.
            whole: [kv_heads, S, d] or [B, kv_heads, S, d]; only what this rank holds is written.
        """
        self._check_heads("whole", whole, self.plan.shape.kv_heads)
        part = whole[self.batch_slice(len(whole))] if whole.ndim == 4 else whole
        owned = self.owned_positions(0, self.plan.length(whole.shape[-2])).to(whole.device)
        flat = self._to_flat(local, len(part) if whole.ndim == 4 else None) if paged else local
        heads = _movable(part)[..., self.kv_heads.start : self.kv_heads.stop, :, :]
        heads[..., owned, :] = _movable(flat)[..., : len(owned), :]
        return whole

    def _to_blocks(self, local: Tensor) -> Tensor:
        """[(B,) heads, slots, d] to [(B *) blocks, heads, block_size, d]."""
        *lead, heads, slots, head_dim = local.shape
        block_size = self.plan.block_size
        blocked = local.reshape(*lead, heads, slots // block_size, block_size, head_dim).transpose(-4, -3)
        return blocked.reshape(-1, heads, block_size, head_dim)

    def _to_flat(self, cache: Tensor, batch: int | None) -> Tensor:
        """The inverse of `_to_blocks` for `batch` sequences, or for one without a batch dim."""
        lead = () if batch is None else (batch,)
        blocked = cache.reshape(*lead, -1, *cache.shape[1:])
        return blocked.transpose(-4, -3).flatten(-3, -2)

    def _check_heads(self, argument: str, tensor: Tensor, heads: int) -> None:
        if tensor.ndim not in (3, 4) or tensor.shape[-3] != heads:
            name = "q_heads" if argument == "q" else "kv_heads"
            expected = f"[{name}, S, d] or [B, {name}, S, d] with {name}={heads}"
            raise ArgumentError(argument, tuple(tensor.shape), expected)
        if tensor.ndim == 3 and self.plan.kvdp > 1 and argument != "q":
            raise ArgumentError(
                argument, tuple(tensor.shape), f"[B, kv_heads, S, d], whose batch kvdp={self.plan.kvdp} divides"
            )


def _movable(tensor: Tensor) -> Tensor:
    """float8 as its bytes: torch moves float8 with few of its operations."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
