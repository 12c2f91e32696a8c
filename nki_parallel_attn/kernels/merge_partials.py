"""Partial attention outputs: normalise before the exchange, merge by log-sum-exp after it.

The statistics of an exchange are computed at once. The element-wise work is cut into small pieces, which the caller
issues between units of attention: an engine runs in program order, and a long piece would hold up the next maximum.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.online_softmax import Partial, gpsimd
from nki_parallel_attn.nki import nisa, nl

# A row that sees a key has a sum of about 1 or more. The floor keeps the others inside the logarithm's range.
LEAST_SUM = 2.0**-60
# Below the log-sum-exp of any row that sees a key, above that of any that sees none: those get weight 0.
NOTHING_SEEN = -1.0e18
LARGEST = 3.0e38


class Pieces(nl.NKIObject):  # type: ignore[misc]
    """Element-wise operations in waiting, and what comes after them; first come, first issued."""

    def __init__(self) -> None:
        self.waiting = []  # type: list[Any]
        self.issued = 0

    def add(self, dst: Any, data1: Any, data2: Any, op: Any) -> None:
        """dst = data1 op data2."""
        self.waiting.append([dst, data1, data2, op])

    def then(self, owner: Any, argument: int) -> None:
        """Call owner.pieces_done(argument) after what has been added."""
        self.waiting.append([owner, argument])

    def issue(self, count: int) -> int:
        """Issue up to `count` on GpSimd; how many it were."""
        number = min(count, len(self.waiting))
        for _ in range(number):
            self.issue_next(nisa.engine.gpsimd)
        return number

    def drain(self) -> None:
        """Issue all, on GpSimd and Vector in turn."""
        while self.waiting:
            self.issued += 1
            self.issue_next(nisa.engine.vector if self.issued % 2 else nisa.engine.gpsimd)

    def issue_next(self, engine: Any) -> None:
        piece = self.waiting.pop(0)
        if len(piece) == 2:
            piece[0].pieces_done(piece[1])
        else:
            nisa.tensor_tensor(dst=piece[0], data1=piece[1], data2=piece[2], op=piece[3], engine=engine)


def leave_empty(partial: Partial, tile: int) -> None:
    """A tile of queries that see nothing on any rank."""
    nisa.memset(dst=partial.acc[:, tile, :, :], value=0.0, engine=nisa.engine.gpsimd)
    nisa.memset(dst=partial.shift[:, tile, :, :], value=-2 * NOTHING_SEEN, engine=nisa.engine.gpsimd)


def normalise(partial: Partial, out: Any, lse: Any, v_scale: Any, pieces: Pieces) -> None:
    """Outputs and log-sum-exps of all tiles.

    Args:
        out: [rows, heads, tiles, D], acc divided by its sum, times v_scale; NaN where weight fell on a marked slot.
        lse: float32 [rows, tiles, ranks, own heads].
        v_scale: float32 [rows, 1] or None.
    """
    rows, heads, tiles, dim = out.shape
    shift = nl.ndarray((rows, tiles, heads), dtype=nl.float32, buffer=nl.sbuf)
    for t in range(tiles):
        last = (partial.segments[t][0] + 1) % 2
        nisa.tensor_copy(dst=shift[:, t, :], src=partial.shift[:, t, last, :], engine=nisa.engine.gpsimd)
    sums = nl.ndarray((rows, tiles, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=sums, data=partial.acc[:, :, :, dim], op0=nl.maximum, operand0=LEAST_SUM)
    logarithms = nl.ndarray((rows, tiles, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=logarithms, op=nl.log, data=sums)
    by_rank = (rows, tiles, lse.shape[2], lse.shape[3])
    gpsimd(lse, logarithms.reshape(by_rank), shift.reshape(by_rank), nl.subtract)
    factor = nl.ndarray((rows, tiles, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=factor, data=sums)
    # NaN where weight fell on a marked slot: infinity minus infinity; elsewhere 0 - 0. A row that sees nothing here
    # weighs masked slots equally, marked ones too: they do not count.
    broken = nl.ndarray((rows, tiles, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=broken, data=shift, op0=nl.less, operand0=-NOTHING_SEEN)
    gpsimd(broken, broken, partial.acc[:, :, :, dim + 1], nl.multiply)
    nisa.tensor_scalar(dst=broken, data=broken, op0=nl.multiply, operand0=LARGEST, op1=nl.multiply, operand1=LARGEST)
    gpsimd(broken, broken, broken, nl.subtract)
    gpsimd(factor, factor, broken, nl.add)
    if v_scale is not None:
        nisa.tensor_scalar(dst=factor, data=factor, op0=nl.multiply, operand0=v_scale)
    for t in range(tiles):
        for head in range(heads):
            by = factor[:, t, head : head + 1].broadcast(1, dim)
            pieces.add(out[:, head, t, :], partial.acc[:, t, head, :dim], by, nl.multiply)


def merge_weights(lses: Any) -> Any:
    """float32 [rows, ranks, n], the ranks' weights; 0 on every rank where none saw a key.

    Args:
        lses: float32 [rows, ranks, n].
    """
    rows, ranks, count = lses.shape
    top = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=lses.permute((0, 2, 1)), axis=2)
    nisa.tensor_scalar(dst=top, data=top, op0=nl.maximum, operand0=NOTHING_SEEN)
    weights = nl.ndarray((rows, ranks, count), dtype=nl.float32, buffer=nl.sbuf)
    gpsimd(weights, lses, top.expand_dim(1).broadcast(1, ranks), nl.subtract)
    nisa.activation(dst=weights, op=nl.exp, data=weights)
    total = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weights.permute((0, 2, 1)), axis=2)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.maximum, operand0=LEAST_SUM)
    nisa.reciprocal(dst=total, data=total)
    gpsimd(weights, weights, total.expand_dim(1).broadcast(1, ranks), nl.multiply)
    return weights


def merge(parts: Any, weights: Any, out: Any, pieces: Pieces) -> None:
    """Sum of the ranks' outputs by weight, one tile after the other.

    Args:
        parts: [rows, ranks, tiles, D] of any float dtype.
        weights: float32 [rows, ranks, tiles].
        out: [rows, tiles, D].
    """
    rows, ranks, tiles, dim = parts.shape
    for t in range(tiles):
        acc = nl.ndarray((rows, dim), dtype=nl.float32, buffer=nl.sbuf)
        term = nl.ndarray((rows, dim), dtype=nl.float32, buffer=nl.sbuf)
        for rank in range(ranks):
            weight = weights[:, rank, t : t + 1].broadcast(1, dim)
            target = out[:, t, :] if rank == ranks - 1 else acc
            if rank == 0:
                pieces.add(target, parts[:, rank, t, :], weight, nl.multiply)
            else:
                pieces.add(term, parts[:, rank, t, :], weight, nl.multiply)
                pieces.add(target, acc, term, nl.add)
