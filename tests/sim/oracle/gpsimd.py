"""GpSimd engine instructions of nki.isa."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .operators import ARITHMETIC, reduce, wrap_integer

Integers = NDArray[np.int64]
PARTITIONS_PER_CORE = 16


def tensor_tensor_int32(data1: ArrayLike, data2: ArrayLike, op: str, dtype: str = "int32") -> Integers:
    """Exact integer arithmetic (add, subtract, multiply, maximum, minimum, comparisons), wrapped to 32 bits."""
    x, y = np.asarray(data1, np.int64), np.asarray(data2, np.int64)
    functions = {name: getattr(np, name) for name in ("add", "subtract", "multiply", "maximum", "minimum")}
    with np.errstate(over="ignore"):  # a product beyond int64 wraps there, which keeps its low 32 bits
        result = functions[op](x, y) if op in functions else ARITHMETIC[op](x, y).astype(np.int64)
    return wrap_integer(result, dtype)


def iota(partitions: int, pattern: list[list[int]], offset: int = 0, channel_multiplier: int = 0) -> Integers:
    """[partitions, *sizes]: offset + partition * channel_multiplier + the sum of index * step over the pattern."""
    sizes = [num for _, num in pattern]
    result = np.empty((partitions, *sizes), np.int64)
    for index in itertools.product(range(partitions), *map(range, sizes)):
        steps = sum(i * step for i, (step, _) in zip(index[1:], pattern, strict=True))
        result[index] = offset + index[0] * channel_multiplier + steps
    return wrap_integer(result, "int32")


def affine_select(
    pattern: list[list[int]],
    channel_multiplier: int,
    on_true: ArrayLike,
    on_false: float,
    cmp_op: str = "equal",
    offset: int = 0,
) -> NDArray[np.float64]:
    """on_true where the affine value compares true with 0, else on_false; the pattern runs over the flat free dims."""
    tile = np.asarray(on_true, np.float64)
    affine = iota(tile.shape[0], pattern, offset, channel_multiplier).reshape(tile.shape)
    return np.where(ARITHMETIC[cmp_op](affine, np.zeros_like(affine)) != 0, tile, on_false)


def local_gather(
    src_buffer: ArrayLike, index: ArrayLike, num_elem_per_idx: int = 1, num_valid_indices: int | None = None
) -> NDArray[np.generic]:
    """[P, valid indices, num_elem_per_idx]: per 16-partition core, elements from each index on, in all its partitions.

    The core's indices are its slice of `index` read partition first; an index is an offset in elements.
    """
    source, places = np.asarray(src_buffer), np.asarray(index, np.int64)
    flat = source.reshape(source.shape[0], -1)
    blocks = []
    for start in range(0, flat.shape[0], PARTITIONS_PER_CORE):
        core = slice(start, start + PARTITIONS_PER_CORE)
        order = places[core].reshape(PARTITIONS_PER_CORE, -1).flatten(order="F")[:num_valid_indices]
        elements = order[:, None] + np.arange(num_elem_per_idx)
        blocks.append(flat[core][:, elements])
    return np.concatenate(blocks)


def nc_n_gather(data: ArrayLike, indices: ArrayLike) -> NDArray[np.generic]:
    """data[p, indices[p, ...]] with the free dims of data flattened; result in the shape of the indices."""
    source, places = np.asarray(data), np.asarray(indices, np.int64)
    flat = np.take_along_axis(source.reshape(source.shape[0], -1), places.reshape(places.shape[0], -1), axis=1)
    return flat.reshape(places.shape)


def tensor_partition_reduce(op: str, data: ArrayLike) -> NDArray[np.float64] | Integers:
    """[1, ...]: add, average, maximum over partitions; bitwise_or, bitwise_and on integers."""
    if op == "average":
        return np.asarray(data, np.float64).mean(axis=0, keepdims=True)
    if op in ("bitwise_or", "bitwise_and"):
        function = np.bitwise_or if op == "bitwise_or" else np.bitwise_and
        return function.reduce(np.asarray(data, np.int64), axis=0, keepdims=True)
    return reduce(op, data, 0, keepdims=True)


def sequence_bounds(segment_ids: ArrayLike) -> Integers:
    """[1, 2, n]: first and one-past-last position of each element's run of equal ids; n and -1 for id 0."""
    ids = np.asarray(segment_ids).reshape(-1)
    n = len(ids)
    bounds = np.empty((1, 2, n), np.int64)
    start = 0
    for _, run in itertools.groupby(ids):
        end = start + len(list(run))
        bounds[0, :, start:end] = ((n,), (-1,)) if ids[start] == 0 else ((start,), (end,))
        start = end
    return bounds


def nonzero_with_count(dst: ArrayLike, src: ArrayLike, index_offset: int = 0, padding_val: int = -1) -> Integers:
    """dst [P, T+1] after partitions 0, 16, ... got positions of src's nonzeros, padding, and their count."""
    result = np.array(dst, np.int64)
    source = np.asarray(src).reshape(result.shape[0], -1)
    for partition in range(0, result.shape[0], PARTITIONS_PER_CORE):
        found = np.flatnonzero(source[partition] != 0) + index_offset
        result[partition] = padding_val
        result[partition, : len(found)] = found
        result[partition, -1] = len(found)
    return result


def topk(src: ArrayLike, n: int, k: int) -> tuple[NDArray[np.float64], Integers]:
    """[P, k] largest values of each 16-partition group, ascending, and their places in its snake of n elements.

    Snake element i lies in partition i % 16 of the group, column i // 16. Of equal values the earlier ranks higher.
    """
    source = np.asarray(src, np.float64)
    values = np.empty((source.shape[0], k))
    places = np.empty((source.shape[0], k), np.int64)
    for start in range(0, source.shape[0], PARTITIONS_PER_CORE):
        group = slice(start, start + PARTITIONS_PER_CORE)
        snake = source[group, : math.ceil(n / PARTITIONS_PER_CORE)].flatten(order="F")[:n]
        best = np.argsort(-snake, kind="stable")[:k][::-1]
        values[group], places[group] = snake[best], best
    return values, places


def indirect_gather(
    data: ArrayLike, index: ArrayLike, num_elem: int | None = None, group: int = 16
) -> NDArray[np.generic]:
    """What a `.indirect(index)` view of data [P, F] reads: [P, num_elem].

    Offset i of a group of partitions comes from index[i % group, i // group] of that group: 16 partitions for Vector,
    Scalar and GpSimd, 32 for Tensor (nki.language `NkiTensor.indirect`).
    """
    source, places = np.asarray(data), np.asarray(index, np.int64)
    rows = []
    for start in range(0, source.shape[0], group):
        # A last group may hold fewer partitions than `group`; its snake has that many rows.
        part = slice(start, min(start + group, source.shape[0]))
        order = places[part].flatten(order="F")
        rows.append(source[part][:, order[: len(order) if num_elem is None else num_elem]])
    return np.concatenate(rows)


def indirect_scatter(
    dst: ArrayLike, index: ArrayLike, values: ArrayLike, num_elem: int | None = None, group: int = 16
) -> NDArray[np.generic]:
    """dst [P, F] after values [P, num_elem] were written through `.indirect(index)`; later elements win."""
    result = np.array(dst)
    columns = indirect_gather(np.broadcast_to(np.arange(result.shape[1]), result.shape), index, num_elem, group)
    for i in range(columns.shape[1]):
        result[np.arange(result.shape[0]), columns[:, i]] = np.asarray(values)[:, i]
    return result
