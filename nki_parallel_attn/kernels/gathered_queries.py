"""The queries of one exchange: read transposed, all-gathered in HBM, loaded as the Tensor Engine wants them.

Its tiles are those of both cores of a rank, which deal them out one by one. In staging buffers a core's tiles are
adjacent.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.nki import ncc, nisa, nl


class GatheredQueries(nl.NKIObject):  # type: ignore[misc]
    """Tiles start .. stop-1 of the call.

    Attributes:
        mine: this core's tiles, as tile numbers of the call; counts: how many each core has.
        q: [D, group, own heads, own tiles, rows], once load() has been called.
    """

    def __init__(self, call: Any, start: int, stop: int) -> None:
        self.call = call
        self.mine = list(range(start + call.core, stop, call.cores))
        self.counts = [len(range(start + core, stop, call.cores)) for core in range(call.cores)]
        self.own = None  # type: Any
        self.gathered = None  # type: Any
        self.q = None  # type: Any

    def columns(self) -> Any:
        """This core's part of the last dim of staging buffers."""
        call = self.call
        per_tile = call.own_heads * call.rows
        return nl.ds(sum(self.counts[: call.core]) * per_tile, len(self.mine) * per_tile)

    def read(self) -> None:
        """Read this core's tiles of own Q, transposed on the way: [D, own heads, tiles, rows]."""
        call = self.call
        if not self.mine:
            return
        self.own = nl.ndarray((call.dim, call.own_heads, len(self.mine), call.rows), dtype=call.q.dtype, buffer=nl.sbuf)
        # One core has adjacent tiles, two have every other.
        step = len(self.mine) if call.cores == 1 else 1
        for t in range(0, len(self.mine), step):
            for head in range(call.own_heads):
                rows = call.q[head, nl.ds(self.mine[t] * call.rows, step * call.rows), :]
                nisa.dma_transpose(dst=self.own[:, head, t : t + step, :].flatten_dims(1, 2), src=rows)
        if call.factor != 1.0:
            call.constants.apply(self.own, self.own, call.factor, nl.multiply)

    def gather(self) -> None:
        """All-gather, [group * D, (core, own heads, tiles, rows)]: long runs for each partition."""
        call = self.call
        width = sum(self.counts) * call.own_heads * call.rows
        own = call.staged((call.dim, width), call.q.dtype)
        if self.mine:
            nisa.dma_copy(dst=own[:, self.columns()], src=self.own)
        self.own = None
        self.gathered = own
        if call.group_size > 1:
            self.gathered = call.staged((call.group_size * call.dim, width), call.q.dtype)
            call.synchronise(own)
            ncc.all_gather([own], [self.gathered], call.replica_groups, 0)

    def load(self, ranks: Any) -> None:
        """Load the gathered queries of this core's tiles, each rank's in a transfer of its own."""
        call = self.call
        if self.mine and self.q is None:
            shape = (call.dim, call.group_size, call.own_heads, len(self.mine), call.rows)
            self.q = nl.ndarray(shape, dtype=call.q.dtype, buffer=nl.sbuf)
        if self.mine:
            by_rank = self.gathered.reshape_dim(0, (call.group_size, call.dim))
            for rank in ranks:
                nisa.dma_copy(dst=self.q[:, rank, :, :, :], src=by_rank[rank, :, self.columns()])
