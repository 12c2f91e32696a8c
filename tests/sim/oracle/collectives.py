"""nki.collectives over the ranks of one rank list: lists of per-rank arrays in, lists of per-rank arrays out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
_OPS = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum}


def all_reduce(srcs: list[ArrayLike], op: str) -> list[Array]:
    """Every rank holds the reduction."""
    total = _OPS[op].reduce([np.asarray(src, np.float64) for src in srcs], axis=0)
    return [total.copy() for _ in srcs]


def all_gather(srcs: list[ArrayLike], dim: int) -> list[NDArray[np.generic]]:
    """Every rank holds the concatenation, in rank-list order."""
    return [np.concatenate([np.asarray(src) for src in srcs], axis=dim) for _ in srcs]


def reduce_scatter(srcs: list[ArrayLike], op: str) -> list[Array]:
    """Rank i holds the i-th equal part, along dim 0, of the reduction."""
    return np.split(all_reduce(srcs, op)[0], len(srcs), axis=0)


def all_to_all(srcs: list[ArrayLike]) -> list[NDArray[np.generic]]:
    """Rank i holds the i-th part, along dim 0, of every rank, concatenated."""
    parts = [np.split(np.asarray(src), len(srcs), axis=0) for src in srcs]
    return [np.concatenate([part[rank] for part in parts]) for rank in range(len(srcs))]


def all_gather_v(
    srcs: list[ArrayLike], dsts: list[ArrayLike], send_counts: list[int], send_displs: list[int]
) -> tuple[list[NDArray[np.generic]], list[NDArray[np.int64]]]:
    """Flat chunks into equal slots of each dst, whose other elements stay; and metadata row 2 (received counts)."""
    results = []
    for dst in dsts:
        flat = np.array(dst).reshape(-1)
        slot = flat.size // len(srcs)
        for rank, src in enumerate(srcs):
            chunk = np.asarray(src).reshape(-1)[send_displs[rank] : send_displs[rank] + send_counts[rank]]
            flat[rank * slot : rank * slot + chunk.size] = chunk
        results.append(flat.reshape(np.shape(dst)))
    return results, [np.array(send_counts) for _ in dsts]


def all_to_all_v(
    srcs: list[ArrayLike],
    dsts: list[ArrayLike],
    send_counts: ArrayLike,
    send_displs: ArrayLike,
    recv_displs: ArrayLike | None = None,
) -> tuple[list[NDArray[np.generic]], list[NDArray[np.int64]]]:
    """Counts and displacements [rank, peer]; without recv_displs chunks land in equal slots. And received counts."""
    counts, displs = np.asarray(send_counts), np.asarray(send_displs)
    results = []
    for rank, dst in enumerate(dsts):
        flat = np.array(dst).reshape(-1)
        slot = flat.size // len(srcs)
        for peer, src in enumerate(srcs):
            start = displs[peer, rank]
            chunk = np.asarray(src).reshape(-1)[start : start + counts[peer, rank]]
            place = slot * peer if recv_displs is None else int(np.asarray(recv_displs)[rank, peer])
            flat[place : place + chunk.size] = chunk
        results.append(flat.reshape(np.shape(dst)))
    return results, [counts[:, rank].copy() for rank in range(len(srcs))]


def collective_permute(
    srcs: list[ArrayLike], dsts: list[ArrayLike], pairs: list[tuple[int, int]]
) -> list[NDArray[np.generic]]:
    """dst of each target is the source's tensor; other ranks keep their dst."""
    results = [np.array(dst) for dst in dsts]
    for source, target in pairs:
        results[target] = np.array(srcs[source])
    return results


def collective_permute_implicit(srcs: list[ArrayLike]) -> list[NDArray[np.generic]]:
    """Each rank holds its predecessor's tensor, the first that of the last."""
    return [np.array(srcs[rank - 1]) for rank in range(len(srcs))]


def collective_permute_implicit_reduce(srcs0: list[ArrayLike], srcs1: list[ArrayLike], op: str) -> list[Array]:
    """Each rank holds its predecessor's op(src0, src1)."""
    pairs = zip(srcs0, srcs1, strict=True)
    reduced = [_OPS[op](np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return [reduced[rank - 1] for rank in range(len(reduced))]


def processing_rank(group: list[int], rank: int, iteration: int) -> int:
    """Whose data a rank of the ring handles in an iteration: its own at 0, then its predecessors' in turn."""
    return group[(group.index(rank) - iteration) % len(group)]
