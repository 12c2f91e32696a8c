"""Addresses that are only known at run time, and how they become concrete.

An indirect view keeps where its index is; an instruction resolves it when it executes, so the index is read then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .core import current_core, fail
from .enums import engine
from .layout import extent
from .registers import VirtualRegister

if TYPE_CHECKING:
    from .tensor import NkiTensor


@dataclass(frozen=True)
class ScalarOffset:
    """One index for the whole view: it starts index * stride elements later.

    Attributes:
        last: largest valid index, or None when the bound is the end of the storage.
        on_partition: the index moves the start partition.
    """

    index: Any
    stride: int
    last: int | None
    on_partition: bool = False


@dataclass(frozen=True)
class RowOffsets:
    """One index per partition: row p of the view is row index[p] of the tensor, the index in column-major order."""

    index: NkiTensor
    stride: int
    rows: int | None


@dataclass(frozen=True)
class ColumnOffsets:
    """Tensor indirection: element j of a partition is at free offset index[j % G, j // G] of its G partitions."""

    index: NkiTensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Indirection = ScalarOffset | RowOffsets | ColumnOffsets


def index_of(view: NkiTensor) -> NkiTensor | None:
    """The tensor that an indirect view takes its index from, or None when it is a register."""
    assert view.indirection is not None
    index = view.indirection.index
    return None if isinstance(index, VirtualRegister) else index


def resolve(view: NkiTensor, unit: engine, skip: bool) -> NkiTensor | None:
    """`view` with its index read now.

    Args:
        unit: engine that executes the access; it sets the partition groups of tensor indirection.
        skip: leave out what is out of bounds instead of raising (oob_mode.skip).

    Returns:
        A plain view, a GatheredTensor, or None when the access is skipped as a whole.

    Raises:
        OutOfBoundsError: an index outside the tensor, and not `skip`.
    """
    found = view.indirection
    if isinstance(found, ScalarOffset):
        return _resolve_scalar(view, found, skip)
    if isinstance(found, RowOffsets):
        return _resolve_rows(view, found, skip)
    assert isinstance(found, ColumnOffsets)
    return _resolve_columns(view, found, unit)


def _known(index: NkiTensor) -> torch.Tensor:
    """The index's elements; in cost-only mode, where nobody computed them, the core's unknown_value."""
    core = current_core()
    return index.raw if core.computes else torch.tensor(core.unknown_value).expand(index.shape)


def _resolve_scalar(view: NkiTensor, found: ScalarOffset, skip: bool) -> NkiTensor | None:
    index = found.index
    if isinstance(index, VirtualRegister):
        value = index.read_integer()
    else:
        if index.size != 1:
            fail("register", f"a scalar offset is one element, got a tensor of shape {list(index.shape)}")
        value = int(_known(index).reshape(-1)[0].item())
    offset = view.offset + value * found.stride
    storage = view.storage
    total = storage.elements * storage.dtype.itemsize // view.dtype.itemsize
    inside = value >= 0 and offset + extent(view.shape, view.strides) < total
    if not inside or (found.last is not None and value > found.last):
        if skip:
            return None
        limit = f"at most {found.last}" if found.last is not None else f"within {total} elements"
        fail("dynamic-bounds", f"runtime index {value} into {storage.name} is out of bounds ({limit})")
    return view.at(offset)


def _resolve_rows(view: NkiTensor, found: RowOffsets, skip: bool) -> NkiTensor:
    from .tensor import GatheredTensor

    rows = view.shape[0]
    index = found.index
    if index.size < rows:
        fail("dynamic-bounds", f"{index.size} offsets for {rows} rows")
    values = _known(index).to(torch.int64).reshape(index.shape[0], -1).t().reshape(-1)[:rows]
    storage = view.storage
    total = storage.elements * storage.dtype.itemsize // view.dtype.itemsize
    room = total - view.offset - extent(view.shape[1:], view.strides[1:])
    count = found.rows if found.rows is not None else -(-room // found.stride)
    outside = (values < 0) | (values >= count)
    kept = None
    if bool(outside.any()):
        if not skip:
            position = int(outside.nonzero()[0])
            fail(
                "dynamic-bounds",
                f"offset {int(values[position])} at partition {position} is outside the {count} rows of {storage.name}",
            )
        kept = (~outside).nonzero().reshape(-1)
        values = values[kept]
    grid_shape = (count, *view.shape[1:])
    shape = (values.numel(), *view.shape[1:])
    return GatheredTensor(view, shape, grid_shape, view.strides, view.offset, values, kept, index)


def _resolve_columns(view: NkiTensor, found: ColumnOffsets, unit: engine) -> NkiTensor:
    from .tensor import GatheredTensor

    group = 32 if unit is engine.tensor else 16
    partitions, count = view.shape
    index = _known(found.index).to(torch.int64).reshape(found.index.shape[0], -1)
    positions = torch.arange(count)
    groups = torch.arange(partitions) // group * group
    rows = groups[:, None] + positions % group
    columns = positions // group
    if count and (int(rows.max()) >= index.shape[0] or int(columns.max()) >= index.shape[1]):
        fail(
            "dynamic-bounds", f"{count} elements need more offsets than index {list(found.index.shape)} holds per group"
        )
    offsets = index[rows, columns[None, :].expand(partitions, -1)]
    limit = 1
    for size in found.shape[1:]:
        limit *= size
    if bool(((offsets < 0) | (offsets >= limit)).any()):
        fail("dynamic-bounds", f"a free-dimension offset is outside the {limit} elements of a partition")
    if len(found.shape) != 2:
        fail("indirect-view", f"tensor indirection takes a 2-D view, got {list(found.shape)}")
    addresses = view.offset + torch.arange(partitions)[:, None] * found.strides[0] + offsets * found.strides[1]
    total = view.storage.elements * view.storage.dtype.itemsize // view.dtype.itemsize
    return GatheredTensor(view, view.shape, (total,), (1,), 0, addresses.reshape(-1), None, found.index)
