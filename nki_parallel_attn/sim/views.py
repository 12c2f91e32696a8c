"""View operations of NkiTensor: every one derives (shape, strides, offset) and copies nothing.

Source: nki/api/nki/language/__init__.py, NkiTensor; nki/get-started/nki-language-guide.rst; nki/deep-dives/nki-aps.rst.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .core import fail
from .dtypes import DType, kernel_dtype
from .indexing import Indexing, check_scalar_index, check_vector_index
from .indirect import ColumnOffsets, Indirection, RowOffsets, ScalarOffset
from .integers import integer, integers
from .layout import dense_strides, extent, reshape_strides

if TYPE_CHECKING:
    from .tensor import NkiTensor


class ViewOperations(Indexing):
    """The view methods of NkiTensor. On-chip tensors keep their partition dimension first."""

    __slots__ = ()

    # Queries.

    def is_contiguous(self) -> bool:
        """Whether the elements are dense and row-major; on chip, within each partition."""
        first = 1 if self.on_chip else 0
        expected = dense_strides(self.shape)
        return all(
            size == 1 or stride == dense
            for size, stride, dense in zip(self.shape[first:], self.strides[first:], expected[first:], strict=True)
        )

    def get_pattern(self) -> list[list[int]]:
        """The access pattern as [[stride, count], ...]."""
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        """Whether the view uses an address that is only known at run time."""
        return self.indirection is not None

    # Shapes.

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Dimensions in the order `dims`; the partition dimension stays first."""
        order = integers(dims, "dims")
        if sorted(order) != list(range(len(self.shape))):
            fail("view", f"permute needs a permutation of 0..{len(self.shape) - 1}, got {order}")
        if self._first_dim_fixed() and order[0] != 0:
            fail("view", f"permute keeps dimension 0 first here, got {order}")
        return self._derive(tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order), self.offset)

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat dimension `dim`, of size 1, `size` times."""
        dim = self._dim(dim)
        if self.shape[dim] != 1:
            fail("view", f"broadcast needs a dimension of size 1, dimension {dim} of {list(self.shape)} is not")
        if self.on_chip and dim == 0:
            fail("view", "the partition dimension cannot be broadcast by a view")
        size = integer(size, "size")
        if size < 1:
            fail("view", f"broadcast to size {size}, expected at least 1")
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._derive(shape, (*self.strides[:dim], 0, *self.strides[dim + 1 :]), self.offset)

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dimension of size 1 at position `dim`."""
        dim = integer(dim, "dim")
        if not 0 <= dim <= len(self.shape) or (dim == 0 and self._first_dim_fixed()):
            fail("view", f"expand_dim({dim}) on {list(self.shape)}")
        stride = self.strides[dim] * self.shape[dim] if dim < len(self.shape) else 1
        return self._derive(
            (*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], stride, *self.strides[dim:]), self.offset
        )

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Remove dimension `dim`, of size 1."""
        dim = self._dim(dim)
        if self.shape[dim] != 1 or (dim == 0 and self._first_dim_fixed()):
            fail("view", f"squeeze_dim({dim}) on {list(self.shape)}")
        return self._derive(
            (*self.shape[:dim], *self.shape[dim + 1 :]), (*self.strides[:dim], *self.strides[dim + 1 :]), self.offset
        )

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Split dimension `dim` into `shape`, one entry of which may be -1."""
        dim = self._dim(dim)
        sizes = list(integers(shape, "shape"))
        if sizes.count(-1) == 1:
            rest = -math.prod(sizes)
            sizes[sizes.index(-1)] = self.shape[dim] // rest if rest else 0
        if math.prod(sizes) != self.shape[dim] or any(size < 1 for size in sizes):
            fail("view", f"reshape_dim of dimension {dim}, size {self.shape[dim]}, into {list(shape)}")
        if dim == 0 and self._first_dim_fixed() and len(sizes) > 1:
            fail("view", "dimension 0 cannot be split here")
        stride = self.strides[dim]
        inner = [stride * dense for dense in dense_strides(sizes)]
        return self._derive(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *inner, *self.strides[dim + 1 :]),
            self.offset,
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge dimensions start_dim to end_dim (inclusive), which are contiguous with each other."""
        start, end = self._dim(start_dim), self._dim(end_dim)
        if end < start or (start == 0 and self._first_dim_fixed() and end > start):
            fail("view", f"flatten_dims({start_dim}, {end_dim}) on {list(self.shape)}")
        size = math.prod(self.shape[start : end + 1])
        strides = reshape_strides(self.shape[start : end + 1], self.strides[start : end + 1], (size,))
        if strides is None:
            fail("view", f"dimensions {start} to {end} of {self.get_pattern()} are not contiguous in memory")
        return self._derive(
            (*self.shape[:start], size, *self.shape[end + 1 :]),
            (*self.strides[:start], *strides, *self.strides[end + 1 :]),
            self.offset,
        )

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        """The same elements in row-major order under another shape; the partition dimension stays as it is."""
        new = integers(shape, "shape")
        if math.prod(new) != math.prod(self.shape) or any(size < 1 for size in new):
            fail("view", f"reshape of {list(self.shape)} to {list(new)} changes the number of elements")
        if self._first_dim_fixed() and new[0] != self.shape[0]:
            fail("view", f"reshape of {list(self.shape)} to {list(new)} changes dimension 0")
        if self._first_dim_fixed():
            rest = reshape_strides(self.shape[1:], self.strides[1:], new[1:])
            strides = None if rest is None else (self.strides[0], *rest)
        else:
            strides = reshape_strides(self.shape, self.strides, new)
        if strides is None:
            fail("view", f"the layout {self.get_pattern()} cannot be reshaped to {list(new)} without a copy")
        return self._derive(new, strides, self.offset)

    def rearrange(
        self, src_pattern: Sequence[Any], dst_pattern: Sequence[Any], fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """Split, reorder and merge dimensions by name: rearrange(('b', ('h', 'w')), ('b', 'w', 'h'), {'h': 4})."""
        if not (_is_pattern(src_pattern) and _is_pattern(dst_pattern) and isinstance(fixed_sizes or {}, dict)):
            fail("view", f"rearrange takes two tuples of names and a dict, got {src_pattern!r}, {dst_pattern!r}")
        known = fixed_sizes or {}
        if len(src_pattern) != len(self.shape):
            fail("view", f"rearrange pattern {src_pattern!r} for a tensor of {len(self.shape)} dimensions")
        view: Any = self
        names: list[str] = []
        for entry in src_pattern:
            group = (entry,) if isinstance(entry, str) else tuple(entry)
            view = view.reshape_dim(len(names), tuple(known.get(name, -1) for name in group))
            names.extend(group)
        order = [name for entry in dst_pattern for name in ((entry,) if isinstance(entry, str) else entry)]
        if sorted(order) != sorted(names) or len(set(names)) != len(names):
            fail("view", f"rearrange from {src_pattern!r} to {dst_pattern!r} does not use each name once")
        view = view.permute(tuple(names.index(name) for name in order))
        for position, entry in enumerate(dst_pattern):
            if not isinstance(entry, str):
                view = view.flatten_dims(position, position + len(entry) - 1)
        return view  # type: ignore[no-any-return]

    # Raw access.

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """The storage under an explicit [[stride, count], ...] pattern, in elements of `dtype`.

        `offset` is added to this view's own offset; the view's shape and strides have no effect. A `scalar_offset`
        moves the start by that many steps of dimension `indirect_dim` of this view; a `vector_offset` (HBM,
        indirect_dim 0) chooses a row per partition and replaces the first stride.
        """
        kind = self.dtype if dtype is None else kernel_dtype(dtype)
        ratio = self._bytes_ratio(kind)
        try:
            pairs = [(step, count) for step, count in pattern]
        except (TypeError, ValueError):
            fail("access-bounds", f"pattern is {pattern!r}, expected a list of [stride, count]")
        shape = integers((count for _, count in pairs), "count")
        strides = integers((step for step, _ in pairs), "stride")
        if not shape or any(count < 1 for count in shape) or any(step < 0 for step in strides):
            fail(
                "access-bounds",
                f"pattern {list(map(list, pairs))} needs counts of at least 1 and strides of at least 0",
            )
        start = self.offset * self.dtype.itemsize
        if start % kind.itemsize:
            fail("view", f"byte {start} is not aligned to elements of {kind}")
        start = start // kind.itemsize + (0 if offset is None else integer(offset, "offset"))
        if scalar_offset is not None and vector_offset is not None:
            fail("indirect-view", "scalar_offset and vector_offset exclude each other")
        found: Indirection | None = None
        if scalar_offset is not None or vector_offset is not None:
            self._refuse_second_indirection(self.indirection)
            dim = self._dim(indirect_dim)
            step = self.strides[dim] * ratio[0] // ratio[1]
            if scalar_offset is not None:
                check_scalar_index(scalar_offset)
                found = ScalarOffset(scalar_offset, step, None, on_partition=self.on_chip and dim == 0)
            else:
                if dim != 0 or self.on_chip or vector_offset is None:
                    fail("view", "vector_offset takes an HBM tensor and indirect_dim 0")
                check_vector_index(vector_offset)
                found = RowOffsets(vector_offset, step, None)
                strides = (step, *strides[1:])
        view = self._derive(shape, strides, start, kind, found)
        self._check_pattern(view)
        return view

    def view(self, dtype: Any) -> NkiTensor:
        """The same bytes as another dtype; the last dimension, contiguous, grows or shrinks by the ratio of sizes."""
        kind = kernel_dtype(dtype)
        if self.indirection is not None:
            fail("indirect-view", "an indirect view cannot be reinterpreted")
        up, down = self._bytes_ratio(kind)
        last = self.shape[-1]
        if up != down and self.strides[-1] != 1 and last != 1:
            fail("view", f"view({kind}) needs a contiguous last dimension, its stride is {self.strides[-1]}")
        scaled = [self.offset * up, last * up, *(stride * up for stride in self.strides[:-1])]
        if any(value % down for value in scaled):
            fail("view", f"{list(self.shape)} {self.dtype} at offset {self.offset} does not divide into {kind}")
        offset, last, *strides = (value // down for value in scaled)
        return self._derive((*self.shape[:-1], last), (*strides, 1 if up != down else self.strides[-1]), offset, kind)

    reinterpret_cast = view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Columns of each partition chosen at run time (trn3); `index` holds free offsets in a snake pattern."""
        self._refuse_second_indirection(self.indirection)
        if not self.on_chip:
            fail("indirect-view", "tensor indirection takes an SBUF or PSUM tensor")
        check_vector_index(index)
        if index.shape[0] != self.shape[0]:
            fail("indirect-view", f"index has {index.shape[0]} partitions, the tensor {self.shape[0]}")
        count = math.prod(index.shape) if num_elem is None else integer(num_elem, "num_elem")
        found = ColumnOffsets(index, self.shape, self.strides)
        return self._derive((self.shape[0], count), (self.strides[0], 1), self.offset, None, found)

    # Helpers.

    def _bytes_ratio(self, dtype: DType) -> tuple[int, int]:
        """(a, b): an offset in elements of this view is a / b times as many elements of `dtype`."""
        if dtype != self.dtype and self.storage.format is not self.storage.dtype.precise:
            fail("precise-view", f"{self.storage.name} holds {self.storage.dtype} as float32 and has no {dtype} bits")
        return self.dtype.itemsize, dtype.itemsize

    def _check_pattern(self, view: NkiTensor) -> None:
        storage, kind = view.storage, view.dtype
        total = storage.elements * storage.dtype.itemsize // kind.itemsize
        rows_known = not isinstance(view.indirection, RowOffsets)
        shape = view.shape if rows_known else view.shape[1:]
        last = view.offset + extent(shape, view.strides if rows_known else view.strides[1:])
        if view.offset < 0 or last >= total:
            fail(
                "access-bounds",
                f"pattern {view.get_pattern()} at {view.offset} reaches element {last} of {storage.name}'s {total}",
            )
        if not self.on_chip:
            return
        free = storage.free_elements * storage.dtype.itemsize // kind.itemsize
        if view.shape[0] > 1 and view.strides[0] != free:
            fail(
                "partition-stride",
                f"the partition stride is {view.strides[0]}, a partition of {storage.name} has {free} elements",
            )
        if view.offset % free + extent(view.shape[1:], view.strides[1:]) >= free:
            fail("access-bounds", f"pattern {view.get_pattern()} leaves a partition of {free} elements")


def _is_pattern(value: Any) -> bool:
    """Whether `value` is names and groups of names, as rearrange takes them."""
    return isinstance(value, (tuple, list)) and all(
        isinstance(entry, str) or (isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry))
        for entry in value
    )
