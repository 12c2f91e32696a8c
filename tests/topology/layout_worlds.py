"""Random sharded worlds, and the two layouts' definitions written out token by token."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st

from nki_parallel_attn.topology.kv_layout import BoundLayout, Contiguous, Interleaved, RoundRobin

MAX_RANKS = 4096


@dataclass(frozen=True)
class World:
    """A bound layout beside the numbers that it was made of; `interleave` is None for contiguous shards."""

    layout: BoundLayout
    ranks: int
    block_size: int
    interleave: int | None
    local_length: int

    def locate(self, position: int) -> tuple[int, int]:
        """(owner, local slot) by the definition of the layout, in Python integers."""
        if self.interleave is None:
            return position // self.local_length, position % self.local_length
        i, b, virtual = self.interleave, self.block_size, self.ranks * self.block_size
        v = position % virtual
        block, offset = position // virtual, (v // (self.ranks * i)) * i + v % i
        return (v // i) % self.ranks, block * b + offset


@st.composite
def worlds(draw: st.DrawFn, max_ranks: int = MAX_RANKS, max_block: int = 32, max_local: int = 2**20) -> World:
    ranks = draw(
        st.integers(1, max_ranks) | st.sampled_from([n for n in (1, 2, 4, 8, 64, max_ranks) if n <= max_ranks])
    )
    block_size = draw(st.integers(1, max_block))
    kind = draw(st.sampled_from(["contiguous", "round_robin", "interleaved"]))
    blocks = draw(st.integers(1, max(1, max_local // block_size)) | st.integers(1, 3))
    if kind == "contiguous":
        layout: BoundLayout = Contiguous().bind(ranks=ranks, block_size=block_size, local_length=blocks * block_size)
        return World(layout, ranks, block_size, None, blocks * block_size)
    if kind == "round_robin":
        layout = RoundRobin().bind(ranks=ranks, block_size=block_size)
        return World(layout, ranks, block_size, block_size, blocks * block_size)
    interleave = draw(st.sampled_from([i for i in range(1, block_size + 1) if block_size % i == 0]))
    layout = Interleaved(interleave).bind(ranks=ranks, block_size=block_size)
    return World(layout, ranks, block_size, interleave, blocks * block_size)
