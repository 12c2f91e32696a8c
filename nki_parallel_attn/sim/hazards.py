"""Who wrote and who read each part of a tensor last, and when: the dependencies of the timeline.

A tensor's bytes are kept as lanes (groups of 32 partitions on chip, column tiles in HBM), each cut into intervals that
were accessed alike. An access touches the intervals it covers, so its cost does not grow with the program's length.
Ranges are those of strided views: an access that skips bytes inside its range is taken to touch them, except columns
of an HBM tensor.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any, Protocol

from .memory import Storage
from .tensor import GatheredTensor, NkiTensor

QUADRANT = 32
MAX_LANES = 256
MERGED = 16


class Resource(Protocol):
    """What executes instructions: an engine, the DMA engines, the collective cores."""

    name: str


Interval = list[Any]
"""[end of the last write, its Resource, end of the last read since, its Resource]."""


class Lane:
    """Intervals over [0, end) bytes. `cuts[i]` is where `intervals[i]` starts."""

    __slots__ = ("_found", "cuts", "end", "intervals")

    def __init__(self, end: int, interval: Interval) -> None:
        self.end = end
        self.cuts = [0]
        self.intervals = [interval]
        self._found: dict[tuple[int, int], list[Interval]] = {}

    def copy(self) -> Lane:
        """An independent lane with the same history."""
        other = Lane(self.end, self.intervals[0])
        other.cuts = self.cuts.copy()
        other.intervals = [interval.copy() for interval in self.intervals]
        return other

    def range(self, low: int, high: int) -> list[Interval]:
        """The intervals that make up [low, high), cutting those that stick out."""
        found = self._found.get((low, high))
        if found is None:
            start = self._cut(low) if low > 0 else 0
            stop = self._cut(high) if high < self.end else len(self.cuts)
            found = self._found[low, high] = self.intervals[start:stop]
        return found

    def _cut(self, at: int) -> int:
        index = bisect_left(self.cuts, at)
        if index == len(self.cuts) or self.cuts[index] != at:
            self.cuts.insert(index, at)
            self.intervals.insert(index, self.intervals[index - 1].copy())
            self._found.clear()
        return index

    def write(self, low: int, high: int, end: float, by: Resource) -> None:
        """Note a write of [low, high). Many intervals become one; a few stay, to be found again."""
        intervals = self.range(low, high)
        if len(intervals) > MERGED:
            start = bisect_left(self.cuts, low) if low > 0 else 0
            stop = bisect_left(self.cuts, high) if high < self.end else len(self.cuts)
            self.cuts[start:stop] = [max(low, 0)]
            intervals = self.intervals[start:stop] = [[0.0, None, 0.0, None]]
            self._found.clear()
        for interval in intervals:
            interval[:] = end, by, 0.0, None


class History:
    """Accesses of one storage, or of one whole on-chip memory whose tensors have manual addresses.

    Attributes:
        only: the interval of a storage that was always accessed as a whole, else None.
        tenant: its place in an on-chip `space`, or None; see reuse.py.
    """

    __slots__ = ("_known", "_lanes", "_period", "_rows", "_shared", "_size", "_width", "only", "space", "tenant")

    def __init__(self, rows: int, size: int, shared: bool = False) -> None:
        """`rows` partitions of `size` bytes each; 0 rows in HBM. `shared`: of several tensors."""
        self._rows = rows
        self._size = size
        self._shared = shared
        self._known: dict[Any, list[tuple[Lane, int, int]]] = {}
        self._period = 0
        self._width = 0
        interval: Interval = [0.0, None, 0.0, None]
        self.only: Interval | None = None if shared else interval
        self._lanes: list[Lane] = [Lane(size, interval)] if shared else []
        self.tenant: Any = None
        self.space: Any = None

    def __del__(self) -> None:
        if self.tenant is not None:
            self.space.release(self.tenant)

    def intervals(self) -> list[Interval]:
        """All of them."""
        return [interval for lane in self._lanes for interval in lane.intervals]

    def write(self, end: float, by: Resource) -> None:
        """Note a write of all of it."""
        if self.only is not None:
            self.only[:] = end, by, 0.0, None
        for lane in self._lanes:
            lane.write(0, lane.end, end, by)

    def pieces(self, tensor: NkiTensor) -> list[tuple[Lane, int, int]]:
        """(lane, low, high) of what an access to `tensor` touches."""
        if not self._rows:
            return self._find(tensor)
        view = tensor.offset, tensor.shape, tensor.strides, tensor.storage if self._shared else tensor.dtype
        found = self._known.get(view)
        if found is None:
            found = self._known[view] = self._find(tensor)
        return found

    def _find(self, tensor: NkiTensor) -> list[tuple[Lane, int, int]]:
        lanes = self._lanes
        if self.only is not None:
            lanes = self._lanes = [Lane(self._size, self.only)]
            self.only = None
        if type(tensor) is GatheredTensor or (tensor.size == tensor.storage.elements and tensor.storage.arena is None):
            return [(lane, 0, lane.end) for lane in lanes]
        if not self._rows:
            return self._pieces_of_hbm(tensor, tensor.dtype.itemsize)
        storage, itemsize = tensor.storage, tensor.dtype.itemsize
        row, low = divmod(tensor.offset * itemsize, storage.free_elements * storage.dtype.itemsize)
        shape, strides = tensor.shape, tensor.strides
        last = 0
        for dim in range(1, len(shape)):
            last += (shape[dim] - 1) * strides[dim]
        if storage.arena is not None and storage.address is not None:
            row += storage.partition
            low += storage.address[1]
        high = low + (last + 1) * itemsize
        if len(lanes) == 1:
            if self._rows <= QUADRANT or shape[0] == self._rows:
                return [(lanes[0], low, high)]
            lanes = self._lanes = [lanes[0], *(lanes[0].copy() for _ in range((self._rows - 1) // QUADRANT))]
            self._known.clear()
        return [(lane, low, high) for lane in lanes[row // QUADRANT : (row + shape[0] - 1) // QUADRANT + 1]]

    def _pieces_of_hbm(self, tensor: NkiTensor, itemsize: int) -> list[tuple[Lane, int, int]]:
        """Rows of bytes, cut into columns once an access takes some columns of several rows."""
        low = tensor.offset * itemsize
        last = 0
        for size, stride in zip(tensor.shape, tensor.strides, strict=True):
            last += (size - 1) * stride
        high = low + (last + 1) * itemsize
        dense = high - low <= tensor.size * itemsize
        if self._period <= 0 and (self._period < 0 or dense or not self._use_columns(tensor, itemsize, low)):
            return [(self._lanes[0], low, high)]
        period, width = self._period, self._width
        first_row, last_row = low // period, (high - 1) // period
        inner = _inner_bytes(tensor, itemsize, period)
        column = low % period
        if inner is None or column + inner > period:
            column, inner = (column, high - low) if first_row == last_row else (0, period)
        lanes = self._lanes[column // width : (column + inner - 1) // width + 1]
        return [(lane, first_row, last_row + 1) for lane in lanes]

    def _use_columns(self, tensor: NkiTensor, itemsize: int, low: int) -> bool:
        """Divide into column tiles as `tensor` does; False when it is no block of columns."""
        outer = max((stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1), default=0)
        steps = [s for n, s in zip(tensor.shape, tensor.strides, strict=True) if n > 1 and s > 1]
        for step in sorted(set(steps)):
            period = step * itemsize
            inner = _inner_bytes(tensor, itemsize, period)
            if inner is None or self._size % period or outer % step:
                continue
            if inner == period or low % period + inner > period:
                continue
            width = math.gcd(inner, low % period, period)
            while -(-period // width) > MAX_LANES:
                width *= 2
            # What happened before is known by bytes: every row it may concern inherits the latest of it.
            merged = [max((i[k : k + 2] for i in self._lanes[0].intervals), key=lambda pair: pair[0]) for k in (0, 2)]
            self._period, self._width = period, width
            rows, count = self._size // period, -(-period // width)
            self._lanes = [Lane(rows, [*merged[0], *merged[1]]) for _ in range(count)]
            return True
        self._period = -1
        return False


def _inner_bytes(tensor: NkiTensor, itemsize: int, period: int) -> int | None:
    """Extent of one row of the view, when its larger strides are multiples of `period` bytes; else None."""
    inner = 0
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        if size == 1:
            continue
        step = stride * itemsize
        if step < period:
            inner += (size - 1) * step
        elif step % period:
            return None
    return inner + itemsize


def history_of(storage: Storage) -> History:
    """A fresh history for `storage`."""
    if storage.free_elements:
        return History(storage.shape[0], storage.free_elements * storage.dtype.itemsize)
    return History(0, storage.elements * storage.dtype.itemsize)
