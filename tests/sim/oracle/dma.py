"""DMA: access patterns, `dma_copy`, `dma_transpose`, `dma_compute`, `sendrecv`; nki-aps.rst and nki.isa."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .dtypes import convert

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


def access_pattern(
    base_shape: tuple[int, ...],
    pattern: list[list[int]],
    offset: int = 0,
    scalar_offset: int = 0,
    vector_offset: ArrayLike | None = None,
    indirect_dim: int = 0,
) -> Integers:
    """Flat element index, in the base tensor, of every element of `base.ap(pattern, ...)`; shape = the counts.

    The dynamic offset moves by whole steps of dim `indirect_dim` of the base tensor; with a vector offset, element w of
    the leading dim starts at row vector_offset[w] and the leading step of the pattern is ignored.
    """
    step = int(np.prod(base_shape[indirect_dim + 1 :], dtype=np.int64))
    counts = [count for _, count in pattern]
    index = np.full(counts, offset + scalar_offset * step, np.int64)
    for dim, (stride, count) in enumerate(pattern):
        along = np.arange(count, dtype=np.int64) * stride
        if dim == 0 and vector_offset is not None:
            along = np.asarray(vector_offset, np.int64).reshape(-1)[:count] * step
        index += along.reshape([-1 if d == dim else 1 for d in range(len(counts))])
    return index


def dma_copy(src: ArrayLike, src_dtype: str, dst_shape: tuple[int, ...], dst_dtype: str) -> Array:
    """The values of dst: elements in row-major order, cast through float32 when the dtypes differ."""
    return convert(np.asarray(src, np.float64).reshape(dst_shape), src_dtype, dst_dtype)


def gather(base: ArrayLike, index: Integers, dst: ArrayLike) -> tuple[Array, NDArray[np.bool_]]:
    """Indirect read with `oob_mode.skip`: dst with row w replaced where all of index[w] is in the base; and which were.

    With `oob_mode.error` any row that did not is an error.
    """
    flat = np.asarray(base, np.float64).reshape(-1)
    inside = ((index >= 0) & (index < flat.size)).reshape(index.shape[0], -1).all(1)
    result = np.array(dst, np.float64).reshape(index.shape)
    result[inside] = flat[index[inside]]
    return result.reshape(np.shape(dst)), inside


def scatter(base: ArrayLike, index: Integers, src: ArrayLike) -> tuple[Array, NDArray[np.bool_]]:
    """Indirect write with `oob_mode.skip`: the base after rows were written in order; and which rows were."""
    flat = np.array(base, np.float64).reshape(-1)
    inside = ((index >= 0) & (index < flat.size)).reshape(index.shape[0], -1).all(1)
    rows = np.asarray(src, np.float64).reshape(index.shape)
    for row in np.flatnonzero(inside):
        flat[index[row]] = rows[row]
    return flat.reshape(np.shape(base)), inside


def dma_transpose(src: ArrayLike) -> NDArray[np.generic]:
    """2-D: (1, 0); 3-D: (2, 1, 0); 4-D: (3, 1, 2, 0)."""
    array = np.asarray(src)
    return array.transpose({2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[array.ndim])


def dma_gather_transpose(base: ArrayLike, indices: ArrayLike, rows: int) -> NDArray[np.generic]:
    """Indirect transpose: rows of the base at indices read column by column, then transposed."""
    order = np.asarray(indices, np.int64).T.flatten()[:rows]
    return dma_transpose(np.asarray(base)[order])


def dma_compute(srcs: list[ArrayLike]) -> Array:
    """Sum of the sources, element by element, in float64 (the engine: float32)."""
    return np.sum([np.asarray(src, np.float64).reshape(np.shape(srcs[0])) for src in srcs], axis=0)


def scatter_add(base: ArrayLike, index: Integers, src: ArrayLike) -> Array:
    """dst(HBM)[indices] += src: rows with unique indices."""
    current, inside = gather(base, index, np.zeros(index.shape))
    return scatter(base, np.where(inside.reshape(-1, *[1] * (index.ndim - 1)), index, -1), current + src)[0]


def gather_add(dst: ArrayLike, base: ArrayLike, index: Integers) -> Array:
    """dst(SBUF) += src(HBM)[indices]; skipped rows are unchanged."""
    read, inside = gather(base, index, np.zeros(index.shape))
    total = np.array(dst, np.float64).reshape(index.shape)
    total[inside] += read[inside]
    return total.reshape(np.shape(dst))


def sendrecv(sent: dict[int, ArrayLike], send_to: dict[int, int]) -> dict[int, NDArray[np.generic]]:
    """What each LNC core finds in its dst: the tile of the core that sent to it."""
    return {target: np.array(sent[core]) for core, target in send_to.items()}
