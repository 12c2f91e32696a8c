"""The partial results of one exchange: normalised, sent all-to-all to the ranks that own the heads, merged, stored.

What a rank gets of a row is in one piece, outputs first, log-sum-exps after them, so that transfers have long runs and
one collective moves both.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.merge_partials import MergeWeights, Normalisation, merge
from nki_parallel_attn.kernels.online_softmax import Partial
from nki_parallel_attn.nki import ncc, nisa, nl


class ExchangedPartials(nl.NKIObject):  # type: ignore[misc]
    """Partial results of the tiles of `queries`.

    Attributes:
        partial: what the attention has accumulated of this core's tiles.
    """

    def __init__(self, call: Any, queries: Any) -> None:
        self.call = call
        self.mine = queries.mine
        self.counts = queries.counts
        self.partial = None  # type: Any
        self.normalisation = None  # type: Any
        self.parts = None  # type: Any
        self.received = None  # type: Any
        self.weights = None  # type: Any
        self.merged = []  # type: list[Any]
        if self.mine:
            self.partial = Partial(call.rows, len(self.mine), call.heads, call.dim)

    def outputs(self, count: int) -> int:
        """Elements of a row's outputs for one rank, and `count` tiles; the log-sum-exps after them are aligned."""
        size: int = count * self.call.own_heads * self.call.dim
        padding: int = size % self.call.elements_of_float32
        return size + padding

    def width(self, count: int) -> int:
        """Elements of a row for one rank."""
        size: int = self.outputs(count) + count * self.call.own_heads * self.call.elements_of_float32
        return size

    def values_of(self, buffer: Any) -> Any:
        """[rows, group, tiles, own heads, D] of [rows, group, width]."""
        call, count = self.call, len(self.mine)
        values = buffer[:, :, : count * call.own_heads * call.dim]
        return values.reshape_dim(2, (count, call.own_heads, call.dim))

    def lses_of(self, buffer: Any) -> Any:
        """float32 [rows, group, tiles, own heads] of [rows, group, width]."""
        count = len(self.mine)
        return buffer[:, :, self.outputs(count) :].view(nl.float32).reshape_dim(2, (count, self.call.own_heads))

    def take_sums(self) -> None:
        """First step of normalising what has been accumulated."""
        call = self.call
        if self.mine:
            self.normalisation = Normalisation(self.partial, call.group_size, call.own_heads, call.constants)
            self.partial = None

    def normalise(self) -> None:
        """Second step; as urgent pieces of work."""
        call = self.call
        if self.mine:
            shape = (call.rows, call.group_size, self.width(len(self.mine)))
            self.parts = nl.ndarray(shape, dtype=call.q.dtype, buffer=nl.sbuf)
            used, padded = len(self.mine) * call.own_heads * call.dim, self.outputs(len(self.mine))
            if used < padded:
                nisa.memset(dst=self.parts[:, :, used:padded], value=0.0, engine=nisa.engine.gpsimd)
            outs, lses = self.values_of(self.parts), self.lses_of(self.parts)
            self.normalisation.finish(outs, lses, call.v_scale, call.urgent)
            self.normalisation = None

    def send(self) -> None:
        """All-to-all, [group, rows, width of all cores]; read what arrives."""
        call = self.call
        widths = [self.width(count) for count in self.counts]
        sent = call.staged((call.group_size, call.rows, sum(widths)), call.q.dtype)
        place = nl.ds(sum(widths[: call.core]), widths[call.core])
        if self.mine:
            nisa.dma_copy(dst=sent[:, :, place].permute((1, 0, 2)), src=self.parts)
        received = sent
        if call.group_size > 1:
            received = call.staged(sent.shape, call.q.dtype)
            call.synchronise(sent)
            ncc.all_to_all([sent], [received], call.replica_groups, 0)
        if self.mine:
            self.received = nl.ndarray(self.parts.shape, dtype=call.q.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=self.received, src=received[:, :, place].permute((1, 0, 2)))
        self.parts = None

    def take_weights(self) -> None:
        """First step of merging."""
        self.weights = MergeWeights(self.lses_of(self.received).flatten_dims(2, 3), self.call.constants)

    def merge(self) -> None:
        """Last step: merge own heads, one after the other, and store them; as pieces of work."""
        call, count = self.call, len(self.mine)
        self.weights.divide()
        values = self.values_of(self.received)
        weights = self.weights.weights.reshape_dim(2, (count, call.own_heads))
        for head in range(call.own_heads):
            self.merged.append(nl.ndarray((call.rows, count, call.dim), dtype=call.q.dtype, buffer=nl.sbuf))
            merge(values[:, :, :, head, :], weights[:, :, :, head], self.merged[head], call.pieces, self, head * count)
        self.received = self.weights = None

    def pieces_done(self, number: int) -> None:
        """Write a tile of an own head to the result; with tp_out all tiles of the head after its last."""
        call, count = self.call, len(self.mine)
        head, t = number // count, number % count
        merged = self.merged[head]
        if not call.tp_out:
            rows = call.out[head, nl.ds(self.mine[t] * call.rows, call.rows), :]
            nisa.dma_copy(dst=rows, src=merged[:, t, :])
        if t < count - 1:
            return
        self.merged[head] = None
        if not call.tp_out:
            return
        tiles = slice(self.mine[0], self.mine[-1] + 1, call.cores)
        turned = nl.ndarray((call.dim, count, call.rows), dtype=call.q.dtype, buffer=nl.sbuf)
        batch = call.transposer.batch(call.rows)
        for start in range(0, count, batch):
            stop = min(start + batch, count)
            target = turned[:, start:stop, :].flatten_dims(1, 2)
            call.transposer.transpose([merged[:, t, :] for t in range(start, stop)], target)
        columns_of = call.out.reshape_dim(2, (call.tiles, call.rows))
        nisa.dma_copy(dst=columns_of[head, :, tiles, :], src=turned)
