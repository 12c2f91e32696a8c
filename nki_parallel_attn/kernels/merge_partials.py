"""Partial attention outputs: normalise before the exchange, merge by log-sum-exp after it.

The statistics of an exchange are computed at once. The element-wise work is cut into small pieces (element_wise.py),
which the caller issues between units of attention.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.element_wise import Constants, Pieces, gpsimd
from nki_parallel_attn.kernels.online_softmax import Partial
from nki_parallel_attn.kernels.paged_kv import EXTRA_COLUMNS
from nki_parallel_attn.nki import nisa, nl

# A row that sees a key has a sum of about 1 or more. The floor keeps the others inside the logarithm's range.
LEAST_SUM = 2.0**-60
# Below the log-sum-exp of any row that sees a key, above that of any that sees none: those get weight 0.
NOTHING_SEEN = -1.0e18
LARGEST = 3.0e38


def leave_empty(partial: Partial, tile: int) -> None:
    """A tile of queries that see nothing on any rank."""
    nisa.memset(dst=partial.acc[:, tile, :, :], value=0.0, engine=nisa.engine.gpsimd)
    nisa.memset(dst=partial.shift[:, tile, :, :], value=-2 * NOTHING_SEEN, engine=nisa.engine.gpsimd)


class Normalisation(nl.NKIObject):  # type: ignore[misc]
    """Outputs and log-sum-exps of all tiles, in two steps."""

    def __init__(self, partial: Partial, ranks: int, own_heads: int, constants: Constants) -> None:
        """Step 1, on GpSimd."""
        self.acc = partial.acc
        rows, tiles, _, width = partial.acc.shape
        self.dim = width - EXTRA_COLUMNS
        shape = (rows, tiles, ranks, own_heads)
        self.shift = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        flat = self.shift.flatten_dims(2, 3)
        for t in range(tiles):
            last = (partial.segments[t][0] + 1) % 2
            nisa.tensor_copy(dst=flat[:, t, :], src=partial.shift[:, t, last, :], engine=nisa.engine.gpsimd)
        self.sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        constants.apply(self.sums.flatten_dims(2, 3), self.acc[:, :, :, self.dim], LEAST_SUM, nl.maximum)
        # NaN where weight fell on a marked slot: infinity minus infinity; elsewhere 0 - 0. A row that sees nothing here
        # weighs masked slots equally, marked ones too: they do not count.
        self.broken = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        broken = self.broken.flatten_dims(2, 3)
        constants.apply(broken, flat, -NOTHING_SEEN, nl.less)
        gpsimd(broken, broken, self.acc[:, :, :, self.dim + 1], nl.multiply)
        constants.apply(broken, broken, LARGEST, nl.multiply)
        constants.apply(broken, broken, LARGEST, nl.multiply)
        gpsimd(broken, broken, broken, nl.subtract)

    def finish(self, out: Any, lse: Any, v_scale: Any, pieces: Pieces) -> None:
        """Step 2.

        Args:
            out: [rows, ranks, tiles, own heads, D], acc divided by its sum, times v_scale; NaN where weight fell on a
                marked slot.
            lse: float32 [rows, ranks, tiles, own heads].
            v_scale: float32 [rows, 1] or None.
        """
        logarithms = nl.ndarray(self.sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=logarithms, op=nl.log, data=self.sums)
        factor = nl.ndarray(self.sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=factor, data=self.sums)
        gpsimd(lse.permute((0, 2, 1, 3)), logarithms, self.shift, nl.subtract)
        gpsimd(factor, factor, self.broken, nl.add)
        if v_scale is not None:
            nisa.tensor_scalar(dst=factor, data=factor, op0=nl.multiply, operand0=v_scale)
        _, ranks, tiles, own_heads, dim = out.shape
        for t in range(tiles):
            for rank in range(ranks):
                for head in range(own_heads):
                    acc = self.acc[:, t, rank * own_heads + head, :dim]
                    pieces.scale(out[:, rank, t, head, :], acc, factor[:, t, rank, head : head + 1])


class MergeWeights(nl.NKIObject):  # type: ignore[misc]
    """The ranks' weights, in three steps; 0 on every rank where none saw a key.

    Attributes:
        weights: float32 [rows, ranks, n].
    """

    def __init__(self, lses: Any, constants: Constants) -> None:
        """Step 1, on GpSimd. `lses`: float32 [rows, ranks, n]."""
        rows, ranks, count = lses.shape
        self.ranks = ranks
        self.constants = constants
        self.total = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
        top = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
        constants.apply(top, lses[:, 0, :], NOTHING_SEEN, nl.maximum)
        for rank in range(1, ranks):
            gpsimd(top, top, lses[:, rank, :], nl.maximum)
        self.weights = nl.ndarray((rows, ranks, count), dtype=nl.float32, buffer=nl.sbuf)
        gpsimd(self.weights, lses, top.expand_dim(1).broadcast(1, ranks), nl.subtract)

    def add_up(self) -> None:
        """Step 2."""
        nisa.activation(dst=self.weights, op=nl.exp, data=self.weights)
        self.constants.apply(self.total, self.weights[:, 0, :], LEAST_SUM, nl.maximum)
        for rank in range(1, self.ranks):
            gpsimd(self.total, self.total, self.weights[:, rank, :], nl.add)

    def divide(self) -> None:
        """Step 3."""
        nisa.reciprocal(dst=self.total, data=self.total)
        gpsimd(self.weights, self.weights, self.total.expand_dim(1).broadcast(1, self.ranks), nl.multiply)


def merge(parts: Any, weights: Any, out: Any, pieces: Pieces, owner: Any, first: int) -> None:
    """Sum of the ranks' outputs by weight; after tile t, owner.pieces_done(first + t).

    Args:
        parts: [rows, ranks, tiles, D] of any float dtype.
        weights: float32 [rows, ranks, tiles].
        out: [rows, tiles, D].
    """
    rows, ranks, tiles, dim = parts.shape
    accs = [nl.ndarray((rows, dim), dtype=nl.float32, buffer=nl.sbuf) for _ in range(tiles)]
    # Rank by rank, so that no operation needs the result of the one before.
    for rank in range(ranks):
        for t in range(tiles):
            target = out[:, t, :] if rank == ranks - 1 else accs[t]
            weight = weights[:, rank, t : t + 1]
            if rank == 0:
                pieces.scale(target, parts[:, rank, t, :], weight)
            else:
                pieces.add_scaled(target, accs[t], parts[:, rank, t, :], weight)
            if rank == ranks - 1:
                pieces.then(owner, first + t)
