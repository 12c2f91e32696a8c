"""ShardingPlan: the one object that answers every per-rank question about an attention whose KV is shared by ranks.

    plan = ShardingPlan(AttentionShape(q_heads=32, kv_heads=8, head_dim=128), world_size=16, kvp=2)
    plan.rank(5).q_heads                          # range(10, 12)
    plan.rank(5).kvp_arguments(q_pos=0)           # what attention_kv_parallel_segmented_cte asks rank 5 for
    print(plan)

A plan is plain numbers: making one touches no device and no process group.

    plan_feasibility.py  its rules, and the feasible values nearest to a plan that breaks one
    plan_rank.py         one rank's view
    plan_shards.py       whole tensors and their shards
    plan_bytes.py        memory and traffic
    plan_cache_pair.py   whether two plans share one cache
    plan_redistribute.py a cache moved from one plan's ranks to another's
    plan_table.py        the print
    plan_agreement.py    JSON, and the check that all ranks hold the same plan
    plan_groups.py       torch process groups
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nki_parallel_attn import plan_agreement, plan_bytes, plan_cache_pair, plan_shards, plan_table
from nki_parallel_attn.errors import ArgumentError, PlanError
from nki_parallel_attn.plan_feasibility import Request, check_feasible
from nki_parallel_attn.plan_rank import RankView
from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology.kv_layout import BoundLayout, Contiguous, KVLayout, RoundRobin
from nki_parallel_attn.topology.mesh import RankMesh
from nki_parallel_attn.topology.platforms import Platform, platform_for
from nki_parallel_attn.topology.types import AttentionShape, CPCollectiveMode, KVDPCollectiveMode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from nki_parallel_attn.plan_groups import ProcessGroups
    from nki_parallel_attn.plan_redistribute import Redistributed, Redistribution

KV_AXES = ("kvp", "cp", "kvdp")
"""Mesh axes of the ranks that share KV, in the order of their index: index = cp_rank*kvdp + kvdp_rank when decoding."""


@dataclass(frozen=True, init=False)
class ShardingPlan:
    """How one model copy's attention heads and KV cache are dealt over ranks.

    `tp` ranks divide the Q heads of one model copy; world_size = tp x replicas, the replicas outermost. Within a copy,
    groups of G ranks share KV: G = kvp for KV-parallel prefill, or kvdp*cp for decoding, one or the other in one plan.
    So there are tp/G KV groups, each with kv_heads/(tp/G) KV heads, or one KV head where kv_heads divides tp/G. With t
    the rank within its copy, rank_order "consecutive" puts t in KV group t//G at index t%G, and "strided" in KV group
    t%(tp/G) at index t//(tp/G). In both, a rank's Q heads start at (group*G + index) * q_heads_per_rank.

    Args:
        shape: heads and widths of one model copy.
        world_size: ranks in all, logical cores on device.
        tp: ranks of one model copy; by default world_size.
        kvdp: ranks that share KV by batch (decoding).
        cp: ranks that share KV by sequence (decoding).
        kvp: ranks that share KV by sequence (prefill).
        kv_layout: how kvp or cp deals a sequence's positions: Contiguous(), RoundRobin(), and for cp Interleaved(i).
        block_size: tokens in one block of the paged cache.
        seg_size: tokens of one segment of prefill, a multiple of block_size; by default kvp*block_size.
        lnc: physical cores per rank, 1 or 2.
        target: "trn2" or "trn3".
        rank_order: "consecutive" or "strided".
        max_seq_len: tokens of one sequence that the cache must hold. Contiguous needs it for every question about
            positions, since it fixes where one rank's share ends; the other layouts grow evenly and do without.
            `dataclasses.replace(plan, max_seq_len=n)` is the same plan for another length.

    Raises:
        PlanError: a combination that no arrangement of ranks can satisfy; names the rule and the nearest feasible
            values.
        ArgumentTypeError: a parameter of the wrong type.
    """

    shape: AttentionShape
    world_size: int
    tp: int
    kvdp: int
    cp: int
    kvp: int
    kv_layout: KVLayout
    block_size: int
    seg_size: int
    lnc: int
    target: str
    rank_order: str
    max_seq_len: int | None

    def __init__(
        self,
        shape: AttentionShape,
        *,
        world_size: int,
        tp: int | None = None,
        kvdp: int = 1,
        cp: int = 1,
        kvp: int = 1,
        kv_layout: KVLayout = RoundRobin(),  # noqa: B008  (frozen and without fields)
        block_size: int = 128,
        seg_size: int | None = None,
        lnc: int = 2,
        target: str = "trn2",
        rank_order: str = "consecutive",
        max_seq_len: int | None = None,
    ) -> None:
        request = Request(
            shape, world_size, tp, kvdp, cp, kvp, kv_layout, block_size, seg_size, lnc, target, rank_order, max_seq_len
        )
        check_feasible(request)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, getattr(request, field.name))
        object.__setattr__(self, "tp", request.tp_size)
        object.__setattr__(self, "seg_size", request.segment)

    # Group algebra

    @property
    def replicas(self) -> int:
        """Model copies."""
        return self.world_size // self.tp

    @property
    def group_size(self) -> int:
        """G: ranks that share KV, kvp or kvdp*cp."""
        return self.kvp * self.kvdp * self.cp

    @property
    def kv_groups(self) -> int:
        """KV-sharing groups in one model copy, tp/G."""
        return self.tp // self.group_size

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share one sequence's positions: kvp or cp."""
        return self.kvp * self.cp

    @property
    def q_heads_per_rank(self) -> int:
        """Q heads that a rank projects and gets the output of."""
        return self.shape.q_heads // self.tp

    @property
    def kv_heads_per_rank(self) -> int:
        """KV heads in a rank's cache, the same for all ranks of its KV group."""
        return max(1, self.shape.kv_heads // self.kv_groups)

    @cached_property
    def mesh(self) -> RankMesh:
        """The world with axes replica, kv_group, kvp, cp and kvdp, in the order that `rank_order` asks for."""
        sizes = {
            "replica": self.replicas,
            "kv_group": self.kv_groups,
            "kvp": self.kvp,
            "cp": self.cp,
            "kvdp": self.kvdp,
        }
        inner = ("kv_group", *KV_AXES) if self.rank_order == "consecutive" else (*KV_AXES, "kv_group")
        return RankMesh({name: sizes[name] for name in ("replica", *inner)})

    def axes_of(self, group: str) -> tuple[str, ...]:
        """Mesh axes over which the ranks of one `group` vary: "kv" is kvp x cp x kvdp, "tp" a whole model copy.

        Raises:
            ArgumentError: neither "kv" nor "tp" nor a mesh axis.
        """
        if group == "kv":
            return KV_AXES
        if group == "tp":
            return tuple(name for name in self.mesh.names if name != "replica")
        if group not in self.mesh.names:
            raise ArgumentError("group", repr(group), f"one of kv, tp, {', '.join(self.mesh.names)}")
        return (group,)

    def replica_group(self, group: str = "kv") -> ReplicaGroup:
        """Every rank list of one kind, each in index order: "kv" (all that share KV), "kvp", "kvdp", "cp", "tp" ..."""
        return self.mesh.groups(*self.axes_of(group))

    def rank(self, rank: int) -> RankView:
        """One rank's view: its coordinates, heads, positions, and every tensor that a reference page asks it for.

        Raises:
            ArgumentError: a rank outside the world.
        """
        return RankView(self, rank)

    # Positions

    @cached_property
    def layout(self) -> BoundLayout:
        """Where positions live: `kv_layout` bound to the ranks that share a sequence; ranks are kvp or cp indices.

        Raises:
            PlanError: Contiguous over several ranks without max_seq_len.
        """
        ranks, block_size = self.sequence_ranks, self.block_size
        if ranks == 1:
            # One rank holds everything in order, whatever the layout is called.
            return RoundRobin().bind(ranks=1, block_size=block_size)
        if not isinstance(self.kv_layout, Contiguous):
            return self.kv_layout.bind(ranks=ranks, block_size=block_size)
        if self.max_seq_len is None:
            raise PlanError("Contiguous needs max_seq_len, which fixes where a rank's share ends", "max_seq_len=None")
        local_length = -(-self.max_seq_len // (ranks * block_size)) * block_size
        return self.kv_layout.bind(ranks=ranks, block_size=block_size, local_length=local_length)

    def length(self, length: int | None = None) -> int:
        """`length`, by default max_seq_len: the tokens of one sequence.

        Raises:
            ArgumentError: neither is given, a length below 0, or one above max_seq_len.
        """
        if length is None:
            if self.max_seq_len is None:
                raise ArgumentError("length", None, "a number of tokens, since the plan has no max_seq_len")
            return self.max_seq_len
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ArgumentError("length", repr(length), "a number of tokens")
        if self.max_seq_len is not None and length > self.max_seq_len:
            raise ArgumentError("length", length, f"at most max_seq_len={self.max_seq_len}")
        return length

    def blocks_per_sequence(self, length: int | None = None) -> int:
        """Blocks that every rank sets aside for a sequence of `length` tokens (by default max_seq_len)."""
        return self.layout.local_slots(self.length(length)) // self.block_size

    def batch_per_rank(self, batch: int) -> int:
        """B_attn: sequences whose KV a rank holds, batch/kvdp.

        Raises:
            PlanError: kvdp does not divide batch.
        """
        if batch < 1 or batch % self.kvdp:
            near = sorted({max(batch // self.kvdp, 1) * self.kvdp, (batch // self.kvdp + 1) * self.kvdp})
            raise PlanError("kvdp divides batch", f"batch={batch}, kvdp={self.kvdp}", {"batch": [*near]})
        return batch // self.kvdp

    # Whole tensors and their shards

    def unshard_q(self, shards: Sequence[Tensor]) -> Tensor:
        """Put the ranks' [..., q_heads_per_rank, S, d] together as [..., q_heads, S, d], e.g. outputs.

        Args:
            shards: one tensor for each rank of the world, or of the first model copy.
        """
        return plan_shards.unshard_q(self, shards)

    def unshard_kv(
        self, shards: Sequence[Tensor], length: int, batch: int | None = None, *, paged: bool = True
    ) -> Tensor:
        """Put the ranks' caches together; the inverse of `RankView.shard_kv`.

        Args:
            shards: one cache for each rank of the world, or of the first model copy, as `shard_kv` makes them.
            length: tokens of each sequence.
            batch: sequences, before kvdp divided them; None where `shard_kv` was given one without a batch dim.

        Returns:
            [kv_heads, length, d], or [batch, kv_heads, length, d].
        """
        return plan_shards.unshard_kv_all(self, shards, length, batch, paged)

    # One cache, two plans

    def check_same_cache(self, other: ShardingPlan) -> None:
        """Check that both plans put every position of every KV head in the same slot of the same rank.

        Then what one plan's operation wrote the other's reads where it lies, as after prefill with kvp=G under
        RoundRobin and decoding with cp=G; else `redistribute` moves it.

        Raises:
            PlanError: names the first rule that does not hold.
        """
        plan_cache_pair.check_same_cache(self, other)

    def redistribution(
        self, source: ShardingPlan, lengths: Sequence[int], dtype: torch.dtype = torch.bfloat16
    ) -> Redistribution:
        """Bytes that `redistribute` sends for K and V of all layers, by rank; formula in plan_redistribute.py.

        Raises:
            PlanError, ArgumentError: as `redistribute`.
        """
        from nki_parallel_attn.plan_redistribute import redistribution

        return redistribution(self, source, lengths, dtype)

    def redistribute(
        self,
        source: ShardingPlan,
        caches: Sequence[Tensor],
        lengths: Sequence[int],
        block_table: Tensor | None = None,
    ) -> Redistributed:
        """Make this plan's paged caches out of those of `source`; collective over the model copy.

        Args:
            source: any plan of the same shape, world_size and tp.
            caches: this rank's K and V caches of any number of layers, each [num_blocks, kv_heads, block_size, d].
            lengths: tokens of each sequence of the whole batch, the same on every rank.
            block_table: [B/kvdp, max_blocks], physical blocks of the sequences that this rank holds under `source`; by
                default in order, equally many of each, as `RankView.shard_kv` leaves them.

        Returns:
            New caches, each sequence's blocks in order (`blocks_per_sequence()` each, or what the longest one takes if
            the plan has no max_seq_len), zeros in unused slots; and the bytes that this rank sent. `caches` stay.

        Raises:
            PlanError, ArgumentError: plans of different models, caches or lengths that do not fit; before anything is
                sent, and as PeerError on the other ranks.
            RankMismatchError: plans, lengths or dtypes differ between ranks.
            PeerError: a rank died on the way.
        """
        from nki_parallel_attn.plan_redistribute import redistribute

        return redistribute(self, source, caches, lengths, block_table)

    # Machine

    @cached_property
    def platform(self) -> Platform:
        """The smallest machine of `target` that holds the world, or the largest when it takes several."""
        return platform_for(self.target, self.world_size, self.lnc)

    @property
    def kvdp_collective_mode(self) -> KVDPCollectiveMode:
        """What KVDP_collective_mode=None stands for: ALL_TO_ALL where the platform allows it for kvdp ranks."""
        return self.platform.kvdp_collective_modes(self.kvdp, self.lnc)[0]

    def memory(
        self, length: int | None = None, batch: int = 1, dtype: torch.dtype = torch.bfloat16
    ) -> plan_bytes.Memory:
        """KV cache bytes of one rank against the unsharded cache; see plan_bytes.py for the formulas."""
        return plan_bytes.memory(self, length, batch, dtype)

    def traffic(
        self,
        tokens: int,
        batch: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        *,
        partial_dtype: torch.dtype | None = None,
        q_pos: int = 0,
        sliding_window: int = 0,
        kvdp_mode: KVDPCollectiveMode | None = None,
        cp_mode: CPCollectiveMode | None = None,
        statistics: int = 2,
    ) -> plan_bytes.Traffic:
        """Bytes that one rank sends in one layer, per collective, against the least; formulas in plan_bytes.py.

        Args:
            tokens: Q tokens of each sequence in the call: the chunk of a prefill, S_tkg of a decoding step.
            batch: sequences, before kvdp divides them.
            dtype: of Q.
            partial_dtype: of the partial outputs that are exchanged, by default `dtype`.
            q_pos, sliding_window: prefill only; they decide which partial outputs are empty.
            kvdp_mode, cp_mode: decoding only; by default `kvdp_collective_mode`, and ALL_TO_ALL.
            statistics: decoding only; float32 numbers for each row that a CP group gathers: 2, maximum and sum, as the
                reference page does; 1, the log-sum-exp, as the torch backend does.

        Raises:
            ArgumentError: a count below 1, or an argument of the other kind of plan.
            PlanError: kvdp does not divide batch.
        """
        if self.kvp > 1 and (kvdp_mode or cp_mode):
            raise ArgumentError("kvdp_mode, cp_mode", f"{kvdp_mode}, {cp_mode}", "None for a plan that prefills")
        if statistics not in (1, 2) or (self.kvp > 1 and statistics != 2):
            raise ArgumentError("statistics", statistics, "1 or 2 for a plan that decodes, else left out")
        if self.kvdp * self.cp > 1 and (q_pos or sliding_window):
            raise ArgumentError("q_pos, sliding_window", f"{q_pos}, {sliding_window}", "0 for a plan that decodes")
        if self.kvp > 1:
            return plan_bytes.prefill_traffic(
                self, tokens, batch, dtype, partial_dtype or dtype, q_pos=q_pos, sliding_window=sliding_window
            )
        return plan_bytes.decode_traffic(
            self,
            tokens,
            batch,
            dtype,
            partial_dtype or dtype,
            kvdp_mode=kvdp_mode or self.kvdp_collective_mode,
            cp_mode=cp_mode or CPCollectiveMode.ALL_TO_ALL,
            statistics=statistics,
        )

    # Across processes

    def process_groups(self) -> ProcessGroups:
        """The torch process groups of this rank, made once per plan; every rank of the world must call it.

        Raises:
            PlanError: the default process group is missing or does not have world_size ranks.
        """
        from nki_parallel_attn.plan_groups import process_groups

        return process_groups(self)

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """A torch DeviceMesh with the plan's axes of more than one rank; every rank of the world must call it."""
        from nki_parallel_attn.integrations.device_mesh import device_mesh

        return device_mesh(self.mesh, device_type)

    def verify(self, group: ProcessGroup | None = None) -> None:
        """Check that every rank of `group` (default: the world) holds this very plan; collective.

        Raises:
            RankMismatchError: on every rank, naming the ranks that differ and the fields.
        """
        plan_agreement.verify(self, group)

    def to_json(self) -> str:
        """The plan as JSON with a schema version; `from_json` is the inverse."""
        return plan_agreement.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        """The plan that `to_json` wrote.

        Raises:
            ArgumentError: not JSON, another schema version, an unknown or missing field.
            PlanError: as the constructor.
        """
        return cls(**plan_agreement.from_json(text))

    def table(self, length: int | None = None, batch: int | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
        """The plan as text: what it is, its groups, and per rank its coordinates, heads, tokens, blocks and bytes.

        Args:
            length: tokens of each sequence, by default max_seq_len.
            batch: sequences, by default kvdp, the fewest.
            dtype: of the cache.
        """
        return plan_table.table(self, length, batch, dtype)

    def __str__(self) -> str:
        return self.table()
