"""Partial attention outputs: normalise before the exchange, merge by log-sum-exp after it."""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.online_softmax import Partial, gpsimd
from nki_parallel_attn.nki import nisa, nl

# A row that sees a key has a sum of about 1 or more. The floor keeps the others inside the logarithm's range.
LEAST_SUM = 2.0**-60
# Below the log-sum-exp of any row that sees a key, above that of any that sees none: those get weight 0.
NOTHING_SEEN = -1.0e18
LARGEST = 3.0e38


def normalise(partial: Partial, tile: int, out: Any, lse: Any, v_scale: Any) -> None:
    """One tile's outputs and log-sum-exps.

    Args:
        out: [rows, heads, D], acc divided by its sum, times v_scale; NaN where weight fell on a marked slot.
        lse: float32 [rows, heads].
        v_scale: float32 [rows, 1] or None.
    """
    rows, heads, dim = out.shape
    sums = nl.ndarray((rows, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=sums, data=partial.acc[:, tile, :, dim], op0=nl.maximum, operand0=LEAST_SUM)
    nisa.activation(dst=lse, op=nl.log, data=sums)
    shift = partial.shift[:, tile, (partial.segments[tile][0] - 1) % 2, :]
    gpsimd(lse, lse, shift, nl.subtract)
    factor = nl.ndarray((rows, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=factor, data=sums)
    # NaN where weight fell on a marked slot: infinity minus infinity; elsewhere 0 - 0.
    broken = nl.ndarray((rows, heads), dtype=nl.float32, buffer=nl.sbuf)
    # A row that sees nothing here weighs masked slots equally, marked ones too: they do not count.
    nisa.tensor_scalar(dst=broken, data=shift, op0=nl.less, operand0=-NOTHING_SEEN)
    gpsimd(broken, broken, partial.acc[:, tile, :, dim + 1], nl.multiply)
    nisa.tensor_scalar(dst=broken, data=broken, op0=nl.multiply, operand0=LARGEST, op1=nl.multiply, operand1=LARGEST)
    gpsimd(broken, broken, broken, nl.subtract)
    gpsimd(factor, factor, broken, nl.add)
    if v_scale is not None:
        nisa.tensor_scalar(dst=factor, data=factor, op0=nl.multiply, operand0=v_scale)
    gpsimd(out, partial.acc[:, tile, :, :dim], factor.expand_dim(2).broadcast(2, dim), nl.multiply)


def leave_empty(out: Any, lse: Any) -> None:
    """Outputs of queries that see nothing on any rank."""
    nisa.memset(dst=out, value=0.0, engine=nisa.engine.gpsimd)
    nisa.memset(dst=lse, value=2 * NOTHING_SEEN, engine=nisa.engine.gpsimd)


def merge(parts: Any, lses: Any, out: Any) -> None:
    """Merge the ranks' outputs; 0 where no rank saw a key.

    Args:
        parts: [rows, ranks, n, D] of any float dtype.
        lses: float32 [rows, ranks, n].
        out: [rows, n, D].
    """
    rows, ranks, count, dim = parts.shape
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
    acc = nl.ndarray((rows, count, dim), dtype=nl.float32, buffer=nl.sbuf)
    term = nl.ndarray((rows, count, dim), dtype=nl.float32, buffer=nl.sbuf)
    for rank in range(ranks):
        weight = weights[:, rank, :].expand_dim(2).broadcast(2, dim)
        last = rank == ranks - 1
        if rank == 0:
            gpsimd(out if last else acc, parts[:, rank, :, :], weight, nl.multiply)
        else:
            gpsimd(term, parts[:, rank, :, :], weight, nl.multiply)
            gpsimd(out if last else acc, acc, term, nl.add)
