"""Arithmetic on shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a dense tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Distance from the first to the last element."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def repeats(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements share an address."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride == 0:
            return True
        if stride <= reach:
            return _interleaves_twice(shape, strides)
        reach += stride * (size - 1)
    return False


def _interleaves_twice(shape: Sequence[int], strides: Sequence[int]) -> bool:
    addresses = np.zeros(1, dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        addresses = (addresses[:, None] + np.arange(size) * stride).reshape(-1)
    return np.unique(addresses).size < addresses.size


def collapse(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of the fewest dimensions that address the same elements in the same order."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def reshape_strides(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides under which `new` addresses the same elements in the same order, or None when there are none."""
    pieces = collapse(shape, strides)
    result: list[int] = []
    remaining = pieces.pop() if pieces else (1, 1)
    for size in reversed(new):
        if remaining[0] == 1 and size > 1:
            if not pieces:
                return None
            remaining = pieces.pop()
        if remaining[0] % size:
            return None
        result.append(remaining[1])
        remaining = (remaining[0] // size, remaining[1] * size)
    return tuple(reversed(result)) if remaining[0] == 1 and not pieces else None
