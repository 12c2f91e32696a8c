"""Indexing of NkiTensor: integers, slices, Ellipsis, nl.ds, and indices known only at run time.

Source: nki/api/nki/language/__init__.py, NkiTensor; nki/get-started/nki-language-guide.rst, "Tensor Indexing".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .core import fail
from .dtypes import DType
from .enums import MemoryRegion
from .indirect import Indirection, RowOffsets, ScalarOffset
from .integers import integer, is_integer
from .registers import VirtualRegister

if TYPE_CHECKING:
    from .memory import Storage
    from .tensor import NkiTensor


@dataclass(frozen=True)
class DynamicSlice:
    """`nl.ds(start, size)`: elements start to start + size - 1; `start` may be a register or a [1, 1] tensor."""

    start: Any
    size: int


class Indexing:
    """The indexing methods of NkiTensor. On-chip tensors keep their partition dimension."""

    __slots__ = ()

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: DType
    storage: Storage
    on_chip: bool
    indirection: Indirection | None

    def _derive(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: DType | None = None,
        indirection: Indirection | None = None,
    ) -> NkiTensor:
        raise NotImplementedError

    # Indexing.

    def __getitem__(self, key: Any) -> NkiTensor:
        keys = key if type(key) is tuple else (key,)
        shape, strides = self.shape, self.strides
        ndim = len(shape)
        for item in keys:
            if item is Ellipsis:
                keys = self._expand_ellipsis(keys)
                break
        if len(keys) > ndim:
            fail("index-bounds", f"{len(keys)} indices for a tensor of {ndim} dimensions {list(shape)}")
        on_chip = self.on_chip
        offset = self.offset
        new_shape: list[int] = []
        new_strides: list[int] = []
        dropped: list[int] = []
        indirection = self.indirection
        rows_chosen = isinstance(indirection, RowOffsets)
        for dim, item in enumerate(keys):
            size, stride = shape[dim], strides[dim]
            if type(item) is slice:
                start, stop, step = item.start, item.stop, item.step
                if start is None and stop is None and step is None:
                    new_shape.append(size)
                    new_strides.append(stride)
                    continue
                if type(start) is not int or type(stop) is not int or step is not None or not 0 <= start < stop <= size:
                    start, stop, step = self._slice_bounds(dim, item)
                else:
                    step = 1
            elif isinstance(item, DynamicSlice):
                if type(item.start) is not int:
                    indirection = self._new_scalar(dim, item.start, size - item.size, indirection)
                    start, stop, step = 0, item.size, 1
                else:
                    start, step = item.start, 1
                    stop = start + item.size
                if not 0 <= start < stop <= size:
                    fail("index-bounds", f"ds({item.start}, {item.size}) on dimension {dim} of {list(shape)}")
            elif is_dynamic(item):
                indirection = self._new_scalar(dim, item, size - 1, indirection)
                if on_chip and dim == 0:
                    fail("view", "the partition dimension cannot be selected at run time")
                dropped.append(len(new_shape))
                continue
            elif is_integer(item):
                position = int(item)
                if not -size <= position < size:
                    fail("index-bounds", f"index {position} on dimension {dim} of {list(shape)}")
                if position < 0:
                    position += size
                if rows_chosen and dim == 0:
                    fail("indirect-view", f"dimension {dim} is indirect and cannot be indexed")
                offset += position * stride
                if on_chip and dim == 0:
                    new_shape.append(1)
                    new_strides.append(stride)
                else:
                    dropped.append(len(new_shape))
                continue
            else:
                fail("index-bounds", f"{item!r} cannot index dimension {dim}; use integers, slices, ds or Ellipsis")
            if rows_chosen and dim == 0 and (start, stop, step) != (0, size, 1):
                fail("indirect-view", f"dimension {dim} is indirect and cannot be sliced")
            offset += start * stride
            new_shape.append((stop - start + step - 1) // step)
            new_strides.append(stride * step)
        new_shape += shape[len(keys) :]
        new_strides += strides[len(keys) :]
        least = 2 if on_chip else 1
        if len(new_shape) < least and dropped:
            new_shape.append(1)
            new_strides.append(1)
        return self._derive(tuple(new_shape), tuple(new_strides), offset, None, indirection)

    def _expand_ellipsis(self, keys: tuple[Any, ...]) -> tuple[Any, ...]:
        positions = [i for i, item in enumerate(keys) if item is Ellipsis]
        if len(positions) > 1:
            fail("index-bounds", "an index has at most one Ellipsis")
        missing = len(self.shape) - (len(keys) - 1)
        if missing < 0:
            fail("index-bounds", f"{len(keys) - 1} indices for a tensor of {len(self.shape)} dimensions")
        at = positions[0]
        return keys[:at] + (slice(None),) * missing + keys[at + 1 :]

    def _slice_bounds(self, dim: int, item: slice) -> tuple[int, int, int]:
        size = self.shape[dim]
        start = 0 if item.start is None else item.start
        stop = size if item.stop is None else item.stop
        step = 1 if item.step is None else item.step
        if type(start) is not int or type(stop) is not int or type(step) is not int:
            if any(is_dynamic(value) for value in (start, stop, step)):
                fail("view", "a slice has compile-time bounds; use nl.ds(start, size) for a start known at run time")
            start, stop, step = (integer(v, f"slice bound of dimension {dim}") for v in (start, stop, step))
        if start < 0:
            start += size
        if stop < 0:
            stop += size
        if step < 1 or not 0 <= start < stop <= size:
            fail("index-bounds", f"slice {item.start}:{item.stop}:{step} on dimension {dim} of {list(self.shape)}")
        return start, stop, step

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start to end (exclusive) of dimension `dim`, every `step`-th; 0 <= start < end <= size."""
        dim = self._dim(dim)
        start, end, step = integer(start, "start"), integer(end, "end"), integer(step, "step")
        if step < 1 or not 0 <= start < end <= self.shape[dim]:
            fail("index-bounds", f"slice {start}:{end}:{step} on dimension {dim} of {list(self.shape)}")
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def select(self, dim: int, index: Any) -> NkiTensor:
        """The view at `index` along `dim`, which disappears; a tensor or register `index` is resolved at run time."""
        dim = self._dim(dim)
        size = self.shape[dim]
        if not is_dynamic(index) and not 0 <= integer(index, "index") < size:
            fail("index-bounds", f"index {index} on dimension {dim} of {list(self.shape)}")
        return self[(slice(None),) * dim + (index,)]

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """One row of dimension 0 per output partition, chosen at run time by `vector_offset` of shape (P, 1)."""
        if dim != 0:
            fail("view", f"vector_select takes dimension 0, got {dim}")
        if self.on_chip:
            fail("view", "vector_select takes an HBM tensor")
        self._refuse_second_indirection(self.indirection)
        check_vector_index(vector_offset)
        rows = vector_offset.shape[0]
        found = RowOffsets(vector_offset, self.strides[0], self.shape[0])
        return self._derive((rows, *self.shape[1:]), self.strides, self.offset, None, found)

    # Helpers.

    def _dim(self, dim: int) -> int:
        dim = integer(dim, "dim")
        if not -len(self.shape) <= dim < len(self.shape):
            fail("index-bounds", f"dimension {dim} of a tensor of {len(self.shape)} dimensions")
        return dim % len(self.shape)

    def _first_dim_fixed(self) -> bool:
        return self.on_chip or isinstance(self.indirection, RowOffsets)

    def _refuse_second_indirection(self, existing: Indirection | None) -> None:
        if existing is not None:
            fail("indirect-view", "this view is already indirect")

    def _new_scalar(self, dim: int, index: Any, last: int, existing: Indirection | None) -> ScalarOffset:
        self._refuse_second_indirection(existing)
        check_scalar_index(index)
        return ScalarOffset(index, self.strides[dim], last, on_partition=self.on_chip and dim == 0)


def is_dynamic(value: Any) -> bool:
    return isinstance(value, (VirtualRegister, Indexing))


def check_scalar_index(index: Any) -> None:
    if isinstance(index, VirtualRegister):
        return
    if not is_dynamic(index) or index.storage.region is not MemoryRegion.sbuf or math.prod(index.shape) != 1:
        fail("view", f"a runtime index is a register or a [1, 1] tensor in SBUF, got {_named(index)}")
    if not index.dtype.is_integer:
        fail("view", f"a runtime index is an integer tensor, got {index.dtype}")


def check_vector_index(index: Any) -> None:
    if not isinstance(index, Indexing) or index.storage.region is not MemoryRegion.sbuf:
        fail("view", f"vector offsets are a tensor in SBUF, got {_named(index)}")
    if not index.dtype.is_integer:
        fail("view", f"vector offsets are an integer tensor, got {index.dtype}")


def _named(index: Any) -> str:
    return f"{list(index.shape)} in {index.storage.region.value}" if isinstance(index, Indexing) else repr(index)
