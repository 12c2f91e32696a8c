"""NkiTensor: a strided view of a storage, and how instructions read and write its elements.

Kernels see shape, strides, offset, dtype, buffer and the view operations (views.py). Instructions use `raw` (elements
as stored), `f32()` (elements as float32), `put()` (write float32 with the dtype's rounding) and `put_raw()`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .core import fail
from .dtypes import FLOAT32, DType, Format, as_dtype, bits_of
from .enums import MemoryRegion
from .indirect import Indirection
from .layout import dense_strides
from .memory import Arena, Storage
from .views import ViewOperations

Flags = np.ndarray[Any, np.dtype[Any]]


class NKIObject:
    """Base class of objects that kernels define or receive.

    A subclass without an __init__ of its own gets the compiler's, whether it is a dataclass or not: one parameter per
    annotated field, None where the class gives no default, then __post_init__
    (nki/get-started/nki-language-guide.rst, "Class Support").
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = [name for base in reversed(type(self).__mro__) for name in vars(base).get("__annotations__", {})]
        if len(args) > len(fields):
            raise TypeError(f"{type(self).__name__}() takes {len(fields)} arguments but {len(args)} were given")
        given = dict(zip(fields, args, strict=False))
        for name in kwargs:
            if name in given:
                raise TypeError(f"{type(self).__name__}() got multiple values for argument {name!r}")
        for name, value in {**{name: getattr(type(self), name, None) for name in fields}, **given, **kwargs}.items():
            setattr(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Called at the end of the compiler's __init__."""


class NkiTensor(ViewOperations):
    """A tensor in SBUF, PSUM or HBM; views share its storage.

    Attributes:
        shape, strides, offset: in elements of `dtype`, relative to the storage.
        storage: the memory behind it; opaque to kernels.
        indirection: how its run-time address is found, or None.
    """

    __slots__ = (
        "_raw",
        "_size",
        "dtype",
        "format",
        "indirection",
        "name",
        "offset",
        "on_chip",
        "shape",
        "storage",
        "strides",
    )

    def __init__(
        self, shape: Sequence[int], dtype: DType, storage: Storage, buffer: MemoryRegion | None = None, name: str = ""
    ) -> None:
        self.shape = tuple(shape)
        self.strides = dense_strides(self.shape)
        self.offset = 0
        self.dtype = as_dtype(dtype)
        self.storage = storage
        self.name = name or storage.name
        self.on_chip = storage.free_elements > 0
        self.format: Format = storage.format if self.dtype == storage.dtype else self.dtype.precise
        self.indirection: Indirection | None = None
        self._raw: torch.Tensor | None = None
        self._size = math.prod(self.shape)

    def _derive(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: DType | None = None,
        indirection: Indirection | None = None,
    ) -> NkiTensor:
        view = NkiTensor.__new__(NkiTensor)
        view.shape = shape
        view.strides = strides
        view.offset = offset
        view.storage = self.storage
        view.name = self.name
        view.on_chip = self.on_chip
        if dtype is None or dtype == self.dtype:
            view.dtype = self.dtype
            view.format = self.format
        else:
            view.dtype = dtype
            view.format = self.storage.format if dtype == self.storage.dtype else dtype.precise
        view.indirection = self.indirection if indirection is None else indirection
        view._raw = None
        view._size = math.prod(shape)
        return view

    def at(self, offset: int) -> NkiTensor:
        """The same pattern at a known offset."""
        view = self._derive(self.shape, self.strides, offset)
        view.indirection = None
        return view

    # What kernels may ask.

    @property
    def buffer(self) -> MemoryRegion:
        """Memory region."""
        return self.storage.region

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._size

    @property
    def address(self) -> tuple[int, int] | None:
        """(partition, byte offset) given at allocation, or None."""
        return self.storage.address

    def __setitem__(self, key: Any, value: Any) -> None:
        from .language.data import store_item

        store_item(self[key], value)

    def __repr__(self) -> str:
        text = f"NkiTensor({self.name!r}, shape={list(self.shape)}, dtype={self.dtype}, buffer={self.buffer!r})"
        return f"{text}\n{self.f32() if self.dtype.is_float else self.raw}" if self.storage.data is not None else text

    # What checks ask.

    @property
    def partition(self) -> int:
        """First partition it touches."""
        storage = self.storage
        return storage.partition + self.offset // self.partition_elements

    @property
    def partition_elements(self) -> int:
        """Elements of this dtype in one partition of its storage."""
        return self.storage.free_elements * self.storage.dtype.itemsize // self.dtype.itemsize

    @property
    def free_size(self) -> int:
        """Elements per partition, on chip."""
        return self._size // self.shape[0]

    @property
    def covers_storage(self) -> bool:
        """Whether it touches every element of its storage."""
        storage = self.storage
        return self._size * self.dtype.itemsize == storage.elements * storage.dtype.itemsize and 0 not in self.strides

    # Elements.

    def _physical(self, itemsize: int) -> tuple[tuple[int, ...], int]:
        """Strides and offset in the flat memory, in units of `itemsize` bytes (which divides the view's itemsize)."""
        ratio = self.dtype.itemsize // itemsize
        arena = self.storage.arena
        if arena is None:
            return self.strides if ratio == 1 else tuple(s * ratio for s in self.strides), self.offset * ratio
        strides, offset = self._in_arena(arena)
        return tuple(s * ratio for s in strides), offset * ratio

    def _in_arena(self, arena: Arena) -> tuple[tuple[int, ...], int]:
        storage = self.storage
        assert storage.address is not None
        free, pitch = self.partition_elements, arena.partition_bytes // self.dtype.itemsize
        partition, within = divmod(self.offset, free)
        offset = (storage.partition + partition) * pitch + storage.address[1] // self.dtype.itemsize + within
        return (self.strides[0] // free * pitch, *self.strides[1:]), offset

    def _tensor(self, fresh: bool) -> torch.Tensor:
        flat = self.storage.flat(self.format.torch, fresh)
        strides, offset = self._physical(self.dtype.itemsize)
        # An argument may itself be a view: as_strided counts from the start of torch's storage.
        raw = self._raw = flat.as_strided(self.shape, strides, flat.storage_offset() + offset)
        return raw

    @property
    def raw(self) -> torch.Tensor:
        """Elements as stored: a torch view, to read."""
        raw = self._raw
        return raw if raw is not None else self._tensor(False)

    def target(self) -> torch.Tensor:
        """Elements as stored: a torch view, to write in full."""
        raw = self._raw
        if raw is not None:
            return raw
        return self._tensor(self.storage.data is None and self.covers_storage)

    def f32(self) -> torch.Tensor:
        """Elements as float32; the stored ones themselves when they are float32, so do not write to the result."""
        raw = self.raw
        format = self.format
        return raw if format is FLOAT32 else format.decode(raw)

    def put(self, values: torch.Tensor) -> None:
        """Write float32 `values`, rounded to the dtype; any shape with as many elements."""
        target = self.target()
        if values.shape != target.shape:
            values = values.reshape(target.shape)
        if values.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
            values = values.clone()  # an instruction reads all of its input before it writes
        target.copy_(values if self.format.cast else self.format.encode(values))

    def put_raw(self, values: torch.Tensor) -> None:
        """Write elements as stored, bit for bit; any shape with as many elements."""
        target = self.target()
        if values.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
            values = values.clone()
        target.copy_(values if values.shape == target.shape else values.reshape(target.shape))

    def bits(self) -> torch.Tensor:
        """Elements as integers of the same size, to read."""
        raw = self.raw
        return raw if not raw.dtype.is_floating_point and raw.dtype not in _UNSIGNED else raw.view(bits_of(raw.dtype))

    # Written elements.

    def flag_view(self, flags: Flags, grain: int) -> Flags:
        """The part of a per-`grain`-bytes side array of its storage that belongs to this view."""
        ratio = self.dtype.itemsize // grain
        strides, offset = self._physical(grain)
        width = flags.itemsize
        shape = self.shape if ratio == 1 else (*self.shape, ratio)
        steps = strides if ratio == 1 else (*strides, 1)
        found: Flags = np.ndarray(shape, flags.dtype, flags.data, offset * width, tuple(s * width for s in steps))
        return found

    def unwritten(self) -> tuple[int, ...] | None:
        """Index of the first element that nothing has written, or None."""
        storage = self.storage
        if storage.full:
            return None
        flags = storage.flags(self.dtype.itemsize)
        mine = self.flag_view(flags, storage.grain)
        if mine.all():
            if storage.arena is None and self.covers_storage:
                storage.full = True
                storage.written = None
            return None
        return tuple(int(i) for i in np.argwhere(~mine)[0][: len(self.shape)])

    def mark_written(self) -> None:
        """Note that every element has been written."""
        storage = self.storage
        if storage.full:
            return
        if storage.arena is None and self.covers_storage:
            storage.full = True
            storage.written = None
            return
        flags = storage.flags(self.dtype.itemsize)
        self.flag_view(flags, storage.grain)[...] = True

    def mark_written_where(self, chosen: torch.Tensor) -> None:
        """Note that the elements where `chosen`, bool in this view's shape, have been written."""
        storage = self.storage
        if not storage.full:
            flags = storage.flags(self.dtype.itemsize)
            self.flag_view(flags, storage.grain)[chosen.numpy()] = True


_UNSIGNED = (torch.uint16, torch.uint32)


class GatheredTensor(NkiTensor):
    """A view whose rows are scattered over a grid: row i is `grid[index[i]]`. Reading copies, writing scatters.

    Attributes:
        index: int64 tensor of row numbers of the grid.
        asked: shape of the access before rows were skipped.
        kept: which rows of the access are in bounds, when some were skipped; else None.
        offsets: the kernel's tensor that the rows were read from.
    """

    __slots__ = ("_grid_offset", "_grid_shape", "_grid_strides", "asked", "index", "kept", "offsets")

    def __init__(
        self,
        view: NkiTensor,
        shape: tuple[int, ...],
        grid_shape: tuple[int, ...],
        grid_strides: tuple[int, ...],
        grid_offset: int,
        index: torch.Tensor,
        kept: torch.Tensor | None,
        offsets: NkiTensor,
    ) -> None:
        super().__init__(shape, view.dtype, view.storage, view.storage.region, view.name)
        self.format = view.format
        self.strides = view.strides
        self.offset = view.offset
        self._grid_shape, self._grid_strides, self._grid_offset = grid_shape, grid_strides, grid_offset
        self.index = index
        self.kept = kept
        self.offsets = offsets
        self.asked = shape if kept is None else view.shape

    def part(self, shape: tuple[int, ...], index: torch.Tensor) -> GatheredTensor:
        """Other rows of the same grid."""
        grid = self._grid_shape, self._grid_strides, self._grid_offset
        return GatheredTensor(self, shape, *grid, index, None, self.offsets)

    def _grid(self) -> NkiTensor:
        grid = NkiTensor._derive(self, self._grid_shape, self._grid_strides, self._grid_offset)
        grid.on_chip = False
        return grid

    def _grid_index(self) -> tuple[NkiTensor, torch.Tensor]:
        """The grid and the index into it; a grid over single elements of an arena is addressed physically."""
        grid = self._grid()
        arena = self.storage.arena
        if arena is None:
            return grid, self.index
        free, pitch = self.partition_elements, arena.partition_bytes // self.dtype.itemsize
        assert self.storage.address is not None
        base = self.storage.partition * pitch + self.storage.address[1] // self.dtype.itemsize
        return grid, base + self.index // free * pitch + self.index % free

    def _grid_tensor(self) -> tuple[torch.Tensor, torch.Tensor]:
        grid, index = self._grid_index()
        flat = self.storage.flat(self.format.torch)
        if self.storage.arena is not None:
            return flat, index
        return flat.as_strided(grid.shape, grid.strides, flat.storage_offset() + grid.offset), index

    @property
    def raw(self) -> torch.Tensor:
        """A copy of the gathered elements."""
        tensor, index = self._grid_tensor()
        work = bits_of(tensor.dtype)
        return tensor.view(work).index_select(0, index).view(tensor.dtype).reshape(self.shape)

    def target(self) -> torch.Tensor:
        """A scratch tensor: `put` and `put_raw` scatter it."""
        return torch.empty(self.shape, dtype=self.format.torch)

    def put(self, values: torch.Tensor) -> None:
        """Scatter float32 `values`, rounded to the dtype."""
        self.put_raw(self.format.encode(values))

    def put_raw(self, values: torch.Tensor) -> None:
        """Scatter elements as stored."""
        tensor, index = self._grid_tensor()
        work = bits_of(tensor.dtype)
        rows = values.contiguous().view(work).reshape(index.numel(), *tensor.shape[1:])
        tensor.view(work).index_copy_(0, index, rows)

    def flag_view(self, flags: Flags, grain: int) -> Flags:
        """A copy of the flags of the gathered elements."""
        grid, index = self.flag_grid(flags, grain)
        found: Flags = grid[index]
        return found

    def flag_grid(self, flags: Flags, grain: int) -> tuple[Flags, Any]:
        grid, index = self._grid_index()
        if self.storage.arena is not None:
            return flags.reshape(-1, self.dtype.itemsize // grain), index.numpy()
        return NkiTensor.flag_view(grid, flags, grain), index.numpy()

    def mark_written(self) -> None:
        """Note that the scattered elements have been written."""
        if self.storage.full:
            return
        flags = self.storage.flags(self.dtype.itemsize)
        grid, index = self.flag_grid(flags, self.storage.grain)
        grid[index] = True

    def mark_written_where(self, chosen: torch.Tensor) -> None:
        """Note that the chosen ones of the scattered elements have been written."""
        if not self.storage.full:
            flags = self.storage.flags(self.dtype.itemsize)
            grid, index = self.flag_grid(flags, self.storage.grain)
            grid[index[chosen.numpy().reshape(-1)]] = True

    @property
    def covers_storage(self) -> bool:
        """Not known without looking at the index."""
        return False


def require_tensor(value: Any, what: str) -> None:
    """Demand a tensor of the kernel for the argument `what` of a function of nki.language."""
    if not isinstance(value, NkiTensor):
        hint = "; NumPy and torch arrays are arguments of the kernel" if hasattr(value, "__array__") else ""
        fail("tensor-operand", f"{what} is of type {type(value).__name__}, expected a tensor{hint}")
