"""RankView: what one rank of a plan holds, and every tensor that a reference page asks that rank for.

The methods carry the pages' parameter names; topology/ makes the tensors from the bound layout. Decoding methods take
the `positions` [B, S_tkg] of the step's active tokens, of the whole batch and the same on every rank, as
topology/decode_rank.py describes them, and return this rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nki_parallel_attn import plan_shards
from nki_parallel_attn.errors import ArgumentError, PlanError
from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology import (
    block_tables,
    masks,
    projection_shards,
    rank_tensors_cte,
    rank_tensors_tkg,
    slot_mapping,
)
from nki_parallel_attn.topology.decode_rank import DecodeRank
from nki_parallel_attn.topology.kv_layout import BoundLayout

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

    def qkv_columns(self) -> Tensor:
        """Columns of the model's W_qkv [H, d*(Q + 2*KV)], of its bias and of its scales per column that are the rank's.

        `W_qkv[:, view.qkv_columns()]` is what attention_block_tkg asks for: the rank's Q heads, and its group's K and V
        heads, int64 [d*(q_heads + 2*kv_heads)].
        """
        return projection_shards.qkv_columns(self.plan.shape, self.q_heads, self.kv_heads)

    def out_rows(self, rows_per_entry: int = 1) -> slice:
        """Rows of the model's output projection [Q*d, H] that are the rank's: `W_out[view.out_rows()]`.

        Args:
            rows_per_entry: 4 for a packed MX weight [Q*d/4, H, 4], 32 for its scales [Q*d/32, H].

        Raises:
            ArgumentError: the rank's heads end within an entry.
        """
        return projection_shards.out_rows(self.plan.shape, self.q_heads, rows_per_entry)

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
        return rank_tensors_cte.kvp_q_offset(self._prefill_layout, self.sequence_index, q_pos)

    def kvp_rank_id(self) -> Tensor:
        """[1, 1] int32: index within the KV-parallel group."""
        return rank_tensors_cte.kvp_rank_id(self._prefill_layout, self.sequence_index)

    def kvp_group_size(self) -> int:
        """Ranks of the group under RoundRobin, 0 under Contiguous."""
        return rank_tensors_cte.kvp_group_size(self._prefill_layout)

    def global_q_offset(self, q_pos: int, *, apc_mode: bool = False) -> int:
        """q_pos, or 0 in apc_mode."""
        return rank_tensors_cte.global_q_offset(q_pos, apc_mode)

    def valid_num_prior_tokens(self, q_pos: int) -> Tensor:
        """[1, 1] int32: local tokens in blocks wholly at or before q_pos, for apc_mode (RoundRobin only)."""
        return rank_tensors_cte.valid_num_prior_tokens(self._prefill_layout, self.sequence_index, q_pos)

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

    # attention_block_tkg

    @property
    def decode_rank(self) -> DecodeRank:
        """The rank's place among the cp*kvdp ranks of its KV group, as topology/ takes it.

        Raises:
            PlanError: a plan with kvp > 1.
        """
        if self.plan.kvp > 1:
            raise PlanError("attention_block_tkg shares KV by kvdp and cp: kvp == 1", f"kvp={self.plan.kvp}")
        coordinates = self.coordinates
        return DecodeRank(self.plan.layout, coordinates["cp"], self.plan.kvdp, coordinates["kvdp"])

    @property
    def q_heads_attn(self) -> int:
        """Q heads that a rank attends with after the gathers: q_heads*KVDP*CP of attention_block_tkg."""
        return self.plan.q_heads_per_rank * self.plan.group_size

    def kvdp_rank(self) -> Tensor:
        """`KVDP_rank`: [1] uint32."""
        return rank_tensors_tkg.kvdp_rank(self.decode_rank)

    def pos_ids(self, positions: Tensor) -> Tensor:
        """[B/KVDP, S_tkg] int32: local slots filled before each active token; without CP its position."""
        return rank_tensors_tkg.pos_ids(self.decode_rank, positions)

    def swa_start_pos_ids(self, positions: Tensor, sliding_window: int) -> Tensor:
        """[B/KVDP, S_tkg] int32: first local slot in each query's window of `sliding_window` tokens."""
        return rank_tensors_tkg.swa_start_pos_ids(self.decode_rank, positions, sliding_window)

    def max_context_len(self, positions: Tensor) -> Tensor:
        """[1] int32: the longest prior on this rank."""
        return rank_tensors_tkg.max_context_len(self.decode_rank, positions)

    def S_ctx(self, positions: Tensor) -> int:
        """The smallest context length, in whole blocks, that holds every rank's prior and active tokens."""
        return rank_tensors_tkg.s_ctx(self.decode_rank.layout, positions)

    def active_blocks_table(self, sequences: Sequence[Sequence[int]], max_blocks: int, num_blocks: int) -> Tensor:
        """[B/KVDP, max_blocks] int32, or [B/KVDP, kv_heads, max_blocks] in num_blocks*kv_heads addressing.

        Args:
            sequences: physical block of each local block, for each sequence this rank holds KV of.
            max_blocks: width of the table.
            num_blocks: blocks in the cache.
        """
        return block_tables.active_blocks_table(sequences, max_blocks, num_blocks, self.plan.kv_heads_per_rank)

    def kv_cache_update_idx(
        self, positions: Tensor, block_table: Tensor | None = None, *, s_max_ctx: int | None = None
    ) -> Tensor:
        """Where the active tokens go, uint32, its maximum where this rank writes nothing.

        Args:
            positions: [B, S_tkg].
            block_table: [B/KVDP, max_blocks] block numbers, not per head; None for a flat cache.
            s_max_ctx: local length of a flat cache, by default that of max_seq_len.

        Returns:
            Flat [B/KVDP, 1], the start slot; block [B/KVDP, S_tkg], or [B/KVDP, kv_heads, S_tkg] for several heads.
        """
        if block_table is not None:
            heads = self.plan.kv_heads_per_rank
            return rank_tensors_tkg.block_kv_cache_update_idx(self.decode_rank, positions, block_table, heads)
        slots = self.plan.layout.local_slots(self.plan.length()) if s_max_ctx is None else s_max_ctx
        return rank_tensors_tkg.flat_kv_cache_update_idx(self.decode_rank, positions, slots)

    def attention_mask(
        self,
        positions: Tensor,
        S_ctx: int | None = None,
        *,
        tree: Tensor | None = None,
        sliding_window: int = 0,
        is_qk_swapped: bool = False,
    ) -> Tensor:
        """The mask of this rank's local slots and of the active tokens it owns, uint8, 1 = visible.

        Args:
            positions: [B, S_tkg].
            S_ctx: local context length of the bucket for a full mask; None for the active part, beside pos_ids.
            tree: [S_tkg, B, 1 or q_heads_attn, S_tkg] (key, batch, head, query) of speculative tokens; else causal.
            sliding_window: tokens, the query's own included; 0 for none.
            is_qk_swapped: layout of a full mask.

        Returns:
            [S_tkg or S_ctx, B/KVDP, q_heads_attn, S_tkg], swapped [B/KVDP, q_heads_attn, S_tkg, S_ctx].
        """
        rank, heads = self.decode_rank, self.q_heads_attn
        if S_ctx is None:
            return masks.active_mask(rank, positions, heads, tree=tree, sliding_window=sliding_window)
        return masks.full_mask(
            rank, positions, heads, S_ctx, tree=tree, sliding_window=sliding_window, is_qk_swapped=is_qk_swapped
        )

    def shard_attention_mask(
        self, mask: Tensor, positions: Tensor, S_ctx: int, *, is_qk_swapped: bool = False
    ) -> Tensor:
        """This rank's part of any global full mask, [S + S_tkg, B, q_heads_attn, S_tkg] or swapped."""
        return masks.shard_full_mask(self.decode_rank, mask, positions, S_ctx, is_qk_swapped=is_qk_swapped)

    def sink(self, sink: Tensor) -> Tensor:
        """[q_heads_attn, 1] of the model copy's [q_heads] sinks: those of the heads its KV group gathers."""
        return rank_tensors_tkg.group_sink(sink, self.kv_group, self.plan.kv_groups)

    def decode_arguments(self) -> dict[str, Any]:
        """Every argument of attention_block_tkg that the plan alone determines, under the page's names."""
        kvdp, cp = self.plan.kvdp, self.plan.cp
        return {
            "KVDP": kvdp,
            "KVDP_replica_group": self.kvdp_replica_group if kvdp > 1 else None,
            "KVDP_collective_mode": self.plan.kvdp_collective_mode if kvdp > 1 else None,
            "KVDP_rank": self.kvdp_rank() if kvdp > 1 else None,
            "CP": cp,
            "CP_replica_group": self.cp_replica_group if cp > 1 else None,
        }

    # Global tensors and this rank's shards

    def shard_q(self, q: Tensor) -> Tensor:
        """This rank's Q heads of [..., q_heads, S, d]: a view [..., q_heads_per_rank, S, d]."""
        return plan_shards.shard_q(self, q)

    def shard_kv(self, kv: Tensor, *, paged: bool = True) -> Tensor:
        """This rank's part of a global K or V, with zeros in the slots that are left over; differentiable.

        Args:
            kv: [kv_heads, S, d], or [B, kv_heads, S, d] of which kvdp keeps a part; positions 0 .. S-1.
            paged: as blocks, each sequence's in order; else flat.

        Returns:
            [(B_attn *) blocks, kv_heads_per_rank, block_size, d], or flat [(B_attn,) kv_heads_per_rank, slots, d].
        """
        return plan_shards.shard_kv(self, kv, paged)

    def unshard_kv(self, local: Tensor, whole: Tensor, *, paged: bool = True) -> Tensor:
        """Write this rank's shard, as `shard_kv` makes it, to its place in `whole`; returns `whole`.

        Args:
            local: the shard.
            whole: [kv_heads, S, d] or [B, kv_heads, S, d]; only what this rank holds is written.
        """
        return plan_shards.unshard_kv(self, local, whole, paged)

    @property
    def _prefill_layout(self) -> BoundLayout:
        if self.plan.kvdp * self.plan.cp > 1:
            got = f"kvdp={self.plan.kvdp}, cp={self.plan.cp}"
            raise PlanError("attention_kv_parallel_segmented_cte shares KV by kvp: kvdp*cp == 1", got)
        return self.plan.layout
