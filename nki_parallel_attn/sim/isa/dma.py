"""Data movement by the DMA engines between and within HBM and SBUF.

Source: nki/api/nki/isa/__init__.py, dma_copy, dma_transpose and dma_compute; nki/deep-dives/nki-dge.rst (who generates
the descriptors); nki/get-started/about/nki-dma-overview.rst (casts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import PACKED, float8_e8m0fnu, uint32
from ..enums import MemoryRegion, nc_version
from ..enums import dge_mode as DgeMode
from ..enums import engine as Engine
from ..enums import oob_mode as OobMode
from ..instruction import Call, instruction
from ..ops import add
from ..skipping import asked_shape, asked_size, keep_in_bounds, skips
from ..tensor import GatheredTensor, NkiTensor

_UNCASTABLE = frozenset((*PACKED, float8_e8m0fnu))
_TRANSPOSE_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
_MAX_SOURCES = 16


@instruction(engine=Engine.dma, reads=("src",), writes=("dst",))
def dma_copy(
    call: Call,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """Copy src to dst in row-major element order, through float32 when the dtypes differ.

    Args:
        priority: 0 to 3, trn3 and newer.
        oob_mode: `skip` leaves out rows whose run-time index is out of bounds.
        engine: sync or scalar, which trigger hardware descriptor generation (dge_mode.hwdge).
    """
    _require_equal_sizes(call, dst, src=src)
    _require_castable(call, dst, src)
    _require_index_column(call, dst, src)
    if call.core.checking:
        _check_modes(call, dst, src, priority, dge_mode)
        if dge_mode is DgeMode.hwdge:
            call.require(
                dst.dtype == src.dtype,
                "matching-dtype",
                f"dge_mode.hwdge copies bytes: dst {dst.dtype}, src {src.dtype}",
            )
            call.require(
                engine in (Engine.unknown, Engine.sync, Engine.scalar),
                "dma-mode",
                f"engine {engine.name} cannot trigger hwdge",
            )
        else:
            call.require(engine is Engine.unknown, "dma-mode", f"engine={engine.name} needs dge_mode.hwdge")
    if call.core.computes:
        dst, src = _without_skipped(call, dst, src)
        copy(dst, src)


def copy(dst: NkiTensor, src: NkiTensor) -> None:
    """dst = src: bit for bit between equal dtypes, else through float32; packed dtypes cannot be cast."""
    if dst.dtype == src.dtype:
        dst.put_raw(src.raw)
    else:
        dst.put(src.f32())


@instruction(engine=Engine.dma, reads=("src",), writes=("dst",))
def dma_transpose(
    call: Call,
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: DgeMode = DgeMode.unknown,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> None:
    """dst = src with its dimensions reordered, bit for bit.

    An indirect src, of the rows `index.T.flatten()`, is gathered first.

    Args:
        axes: (1, 0), (2, 1, 0) or (3, 1, 2, 0), as src has 2, 3 or 4 dimensions.
        priority: 0 to 3, trn3 and newer.
        dge_mode: for an indirect src unknown or swdge; else hwdge (16-row tiles of 2-byte elements), unknown or none.
        oob_mode: `skip`, for an indirect src, leaves the columns of rows out of bounds as they are.
    """
    shape = asked_shape(src)
    order = _TRANSPOSE_AXES.get(len(shape))
    if order is None or (axes is not None and tuple(axes) != order):
        call.fail("dma-transpose-axes", f"axes {axes} for src {list(shape)}, expected {order or '2 to 4 dimensions'}")
    expected = tuple(shape[axis] for axis in order)
    if dst.shape != expected:
        call.fail("transpose-shape", f"dst is {list(dst.shape)}, expected {list(expected)}")
    if dst.dtype != src.dtype:
        call.fail("matching-dtype", f"src is {src.dtype}, dst {dst.dtype}")
    if isinstance(dst, GatheredTensor):
        call.fail("indirect-view", "dst of a transpose does not take a vector offset")
    if call.core.checking:
        _check_modes(call, dst, src, priority, dge_mode)
        if isinstance(src, GatheredTensor):
            _check_gather_transpose(call, src)
        else:
            _check_direct_transpose(call, src, dge_mode, oob_mode)
    if call.core.computes:
        # Each of these orders is its own inverse.
        back = dst._derive(
            tuple(dst.shape[axis] for axis in order), tuple(dst.strides[axis] for axis in order), dst.offset
        )
        if skips(src):
            call.writes[:] = [back]
        back, src = _without_skipped(call, back, src)
        back.put_raw(src.raw)


def _check_direct_transpose(call: Call, src: NkiTensor, dge_mode: DgeMode, oob_mode: OobMode) -> None:
    call.require(
        dge_mode is not DgeMode.swdge or call.dynamic,
        "dma-mode",
        "dge_mode.swdge transposes an indirect source; use unknown, hwdge or none",
    )
    call.require(
        oob_mode is OobMode.error or call.dynamic, "dma-mode", "oob_mode.skip is for a source at run-time addresses"
    )
    if dge_mode is not DgeMode.hwdge:
        return
    shape = src.shape
    if len(shape) == 2:
        call.require(
            shape[0] == 16, "dma-transpose-hwdge", f"src {list(shape)}: dimension 0 of a 2-dimensional tile is 16"
        )
    else:
        call.require(
            shape[0] in (1, 2, 4, 8, 16) and shape[0] * shape[-2] % 16 == 0,
            "dma-transpose-hwdge",
            f"src {list(shape)}: dimension 0 is 1, 2, 4, 8 or 16, and times the next to last a multiple of 16",
        )
    call.require(shape[-1] <= 128, "dma-transpose-hwdge", f"src {list(shape)}: the last dimension is at most 128")
    call.require(src.dtype.itemsize == 2, "dma-transpose-hwdge", f"src is {src.dtype}, expected a 2-byte dtype")


def _check_gather_transpose(call: Call, src: GatheredTensor) -> None:
    call.require_target(nc_version.gen3, "an indirect transpose")
    shape, index = src.asked, src.offsets
    rule = "dma-transpose-indirect"
    call.require(index.dtype == uint32, "operand-dtype", f"the indices are {index.dtype}, expected uint32")
    call.require(src.dtype.itemsize == 2, rule, f"src is {src.dtype}, expected a 2-byte dtype")
    call.require(
        len(shape) != 4 or 1 in shape[1:3], rule, f"src {list(shape)}: dimension 1 or 2 of 4 dimensions has size 1"
    )
    call.require(shape[-1] <= 128, rule, f"src {list(shape)}: the last dimension is at most 128")
    call.require(shape[0] % 16 == 0, rule, f"src {list(shape)}: dimension 0 is a multiple of 16")
    call.require(len(index.shape) == 2, rule, f"the indices are {list(index.shape)}, expected 2 dimensions")
    call.require(
        index.shape[0] % 16 == 0 and 16 <= index.shape[0] <= 128,
        rule,
        f"the indices are {list(index.shape)}, expected 16 to 128 partitions, a multiple of 16",
    )
    call.require(
        index.shape[-1] == 1 or index.shape[0] == 128,
        rule,
        f"the indices are {list(index.shape)}: several columns need 128 partitions",
    )


@instruction(engine=Engine.dma, reads=("srcs",), writes=("dst",))
def dma_compute(
    call: Call,
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> None:
    """dst = the sum of up to 16 sources, in float32, rounded to dst's dtype.

    With a vector offset it reads, modifies and writes: dst[rows] += tile in SBUF (dst and one source are the same rows
    of an HBM tensor), or dst in SBUF += tensor[rows] (one source is dst).

    Args:
        reduce_op: nl.add.
        scales: None, or 1.0 for each source.
        unique_indices: True; rows that are written are written once.
        oob_mode: `skip` leaves out rows whose run-time index is out of bounds.
    """
    rule = "dma-compute"
    if not 1 <= len(srcs) <= _MAX_SOURCES:
        call.fail(rule, f"{len(srcs)} sources, expected 1 to {_MAX_SOURCES}")
    if reduce_op is not add:
        call.fail(rule, f"reduce_op is {reduce_op!r}, expected nl.add")
    if scales is not None and (not isinstance(scales, Sequence) or list(scales) != [1.0] * len(srcs)):
        call.fail(rule, f"scales is {scales}, expected 1.0 for each of {len(srcs)} sources")
    _require_equal_sizes(call, dst, **{f"srcs[{i}]": src for i, src in enumerate(srcs)})
    for tensor in (dst, *srcs):
        if tensor.dtype in _UNCASTABLE:
            call.fail("dma-cast", f"{tensor.name} is {tensor.dtype}; packed and scale dtypes are not cast to float32")
    _require_index_column(call, dst, *srcs)
    if call.core.checking:
        if any(isinstance(tensor, GatheredTensor) for tensor in (dst, *srcs)):
            _check_read_modify_write(call, dst, srcs, unique_indices)
        else:
            call.require(not call.dynamic, rule, "without a vector offset, addresses are known at compile time")
    if not call.core.computes:
        return
    dst, *srcs = _without_skipped(call, dst, *srcs)
    total = srcs[0].f32()
    for src in srcs[1:]:
        total = total + src.f32().reshape(total.shape)
    dst.put(total)


def _check_read_modify_write(call: Call, dst: NkiTensor, srcs: Sequence[NkiTensor], unique_indices: bool) -> None:
    rule = "dma-compute"
    call.require(len(srcs) == 2, rule, f"{len(srcs)} sources with a vector offset, expected 2")
    call.require(unique_indices, rule, "unique_indices=False is not supported with a vector offset")
    own = [src for src in srcs if _same_elements(src, dst)]
    others = [src for src in srcs if src not in own]
    if isinstance(dst, GatheredTensor):
        fits = len(own) == 1 and not isinstance(others[0], GatheredTensor) and others[0].buffer is MemoryRegion.sbuf
        call.require(fits, rule, "a scatter adds a tile in SBUF to the same rows of dst as one source")
        unique = not call.core.computes or torch.unique(dst.index).numel() == dst.index.numel()
        call.require(unique, rule, "rows of dst occur more than once in the index")
    else:
        fits = len(own) == 1 and isinstance(others[0], GatheredTensor) and dst.buffer is MemoryRegion.sbuf
        call.require(fits, rule, "a gather adds rows of an HBM tensor to dst in SBUF, which is the other source")


def _same_elements(left: NkiTensor, right: NkiTensor) -> bool:
    if left.storage is not right.storage or left.dtype != right.dtype or left.offset != right.offset:
        return False
    if isinstance(left, GatheredTensor) != isinstance(right, GatheredTensor):
        return False
    if isinstance(left, GatheredTensor) and isinstance(right, GatheredTensor):
        return left.shape == right.shape and torch.equal(left.index, right.index)
    return left.shape == right.shape and left.strides == right.strides


# What the three have in common.


def _without_skipped(call: Call, *tensors: NkiTensor) -> list[NkiTensor]:
    """The tensors without skipped rows, and the same in what the call reads and writes."""
    parts = keep_in_bounds(tensors)
    if any(skips(tensor) for tensor in tensors):
        replaced = {id(tensor): part for tensor, part in zip(tensors, parts, strict=True)}
        for listed in (call.reads, call.writes):
            listed[:] = [replaced.get(id(tensor), tensor) for tensor in listed]
    return parts


def _require_equal_sizes(call: Call, dst: NkiTensor, **sources: NkiTensor) -> None:
    for operand, src in sources.items():
        if asked_size(src) != asked_size(dst):
            call.fail(
                "element-count",
                f"dst {list(asked_shape(dst))} has {asked_size(dst)} elements, "
                f"{operand} {list(asked_shape(src))} has {asked_size(src)}",
            )


def _require_castable(call: Call, dst: NkiTensor, src: NkiTensor) -> None:
    if dst.dtype != src.dtype and not _UNCASTABLE.isdisjoint((dst.dtype, src.dtype)):
        call.fail("dma-cast", f"src is {src.dtype}, dst {dst.dtype}; packed and scale dtypes are not cast")


def _require_index_column(call: Call, *tensors: NkiTensor) -> None:
    for tensor in tensors:
        if isinstance(tensor, GatheredTensor) and tensor.offsets.free_size != 1:
            call.fail("view", f"vector offsets are one per partition, [P, 1], got {list(tensor.offsets.shape)}")


def _check_modes(call: Call, dst: NkiTensor, src: NkiTensor, priority: int | None, dge_mode: DgeMode) -> None:
    if priority is not None:
        call.require_target(nc_version.gen4, "priority")
        call.require(0 <= priority <= 3, "dma-mode", f"priority is {priority!r}, expected 0 to 3")
    if dge_mode is DgeMode.hwdge:
        call.require_target(nc_version.gen3, "dge_mode.hwdge")
    if isinstance(src, GatheredTensor) or isinstance(dst, GatheredTensor):
        call.require_target(nc_version.gen3, "vector_offset")
        call.require(
            dge_mode in (DgeMode.unknown, DgeMode.swdge), "dma-mode", f"vector_offset needs swdge, not {dge_mode.name}"
        )


__all__ = ["copy", "dma_compute", "dma_copy", "dma_transpose"]
