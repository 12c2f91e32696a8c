"""A prefill case: one global sequence, and what each rank of a group is given of it.

Caches start as NaN; only the tokens that exist are written, each by looking up its owner. The physical blocks are
shuffled, with unused ones between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology.kv_layout import Contiguous, RoundRobin
from tests.oracle import dense_attention


@dataclass(frozen=True)
class Case:
    """`prior` tokens are in the cache, and those of the call's `rows` queries except the last `padding`."""

    ranks: int
    rows: int
    block_size: int
    prior: int = 0
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    layout: str = "round_robin"
    window: int = 0
    padding: int = 0
    apc: bool = False
    tp_out: bool = False
    scale: float | None = None
    shuffled: bool = True
    absent: tuple[int, ...] = ()  # global blocks whose table entries are -1
    seed: int = 0
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        total = self.prior + self.rows
        object.__setattr__(self, "q", normal(self.heads, self.rows, self.head_dim))
        object.__setattr__(self, "k", normal(self.kv_heads, total, self.head_dim))
        object.__setattr__(self, "v", normal(self.kv_heads, total, self.head_dim))

    @property
    def written(self) -> int:
        return self.prior + self.rows - self.padding

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def local_length(self) -> int:
        """Contiguous shards: whole blocks, enough for the sequence."""
        per_rank = -(-(self.prior + self.rows) // self.ranks)
        return -(-per_rank // self.block_size) * self.block_size

    def shards(self) -> Any:
        layout = Contiguous() if self.layout == "contiguous" else RoundRobin()
        return layout.bind(ranks=self.ranks, block_size=self.block_size, local_length=self.local_length)

    def expected(self) -> Tensor:
        """[H, rows - padding, D] float64: the real queries of all heads."""
        keys = torch.arange(self.written)
        present = ~torch.isin(keys // self.block_size, torch.tensor(self.absent, dtype=torch.int64))
        count = self.rows - self.padding
        return dense_attention(
            self.q[:, :count],
            self.k[:, : self.written],
            self.v[:, : self.written],
            torch.arange(self.prior, self.prior + count),
            scale=self.softmax_scale,
            window=self.window,
            present=present,
        )

    def block_table(self, rank: int) -> tuple[Tensor, int]:
        """[1, max_blocks] int32 with two entries more than needed, and the number of physical blocks."""
        shards = self.shards()
        count = -(-shards.local_slots(self.prior + self.rows) // self.block_size)
        num_blocks = count + 3
        generator = torch.Generator().manual_seed(self.seed * 100 + rank)
        blocks = torch.randperm(num_blocks, generator=generator) if self.shuffled else torch.arange(num_blocks)
        table = torch.full((1, count + (2 if self.layout == "round_robin" else 0)), -1, dtype=torch.int32)
        table[0, :count] = blocks[:count]
        for block in self.absent:
            if int(shards.owner(block * self.block_size)) == rank:
                table[0, int(shards.slot(block * self.block_size)) // self.block_size] = -1
        return table, num_blocks

    def caches(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """K cache, V cache and block table of a rank, token by token from the owner map."""
        shards = self.shards()
        table, num_blocks = self.block_table(rank)
        shape = (num_blocks, self.kv_heads, self.block_size, self.head_dim)
        caches = [torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2)]
        positions = torch.arange(self.written)
        mine = positions[shards.owner(positions) == rank]
        slots = shards.slot(mine)
        blocks, places = table[0, slots // self.block_size].to(torch.int64), slots % self.block_size
        held = blocks >= 0
        for cache, values in zip(caches, (self.k, self.v), strict=True):
            cache[blocks[held], :, places[held]] = values[:, mine[held]].transpose(0, 1)
        return caches[0], caches[1], table

    def arguments(self, rank: int, group: tuple[int, ...] | None = None) -> dict[str, Any]:
        """The operation's arguments for the rank at this index of the group (world ranks 0..ranks-1 by default)."""
        k_cache, v_cache, table = self.caches(rank)
        shards = self.shards()
        per_rank = self.heads // self.ranks
        contiguous = self.layout == "contiguous"
        offset = self.prior - rank * self.local_length if contiguous else self.prior
        arguments: dict[str, Any] = {
            "q": self.q[rank * per_rank : (rank + 1) * per_rank].contiguous(),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_tables": table,
            "kvp_q_offset": torch.tensor([[offset]], dtype=torch.int32),
            "replica_groups": ReplicaGroup([group or range(self.ranks)]),
            "group_size": self.ranks,
            "block_size": self.block_size,
            "seg_size": self.block_size if self.rows % self.block_size == 0 else self.rows,
            "scale": self.softmax_scale,
            "global_q_offset": 0 if self.apc else self.prior,
            "tp_out": self.tp_out,
            "sliding_window": self.window,
        }
        if not contiguous:
            arguments["kvp_rank_id"] = torch.tensor([[rank]], dtype=torch.int32)
            arguments["kvp_group_size"] = self.ranks
        if self.apc:
            prior = int(shards.visible_blocks(rank, self.prior)) * self.block_size
            arguments["apc_mode"] = True
            arguments["valid_num_prior_tokens"] = torch.tensor([[prior]], dtype=torch.int32)
        return arguments

    def heads_of(self, rank: int) -> slice:
        per_rank = self.heads // self.ranks
        return slice(rank * per_rank, (rank + 1) * per_rank)
