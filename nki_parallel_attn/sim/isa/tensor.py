"""Matmul and transpose on the Tensor Engine. Source: nki/api/nki/isa/__init__.py, nc_matmul and nc_transpose."""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import (
    FLOAT8,
    DType,
    bfloat16,
    float8_e4m3,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    tfloat32,
)
from ..enums import MemoryRegion, nc_version
from ..enums import engine as Engine
from ..enums import matmul_perf_mode as PerfMode
from ..instruction import Call, instruction
from ..layout import extent
from ..operand_checks import check_indirection_start
from ..psum import accumulates, note_matmul, put_product
from ..tensor import GatheredTensor, NkiTensor

MATMUL_DTYPES = (float8_e4m3, float8_e5m2, float8_e4m3fn, bfloat16, float16, tfloat32, float32)
_FP32 = (float32, tfloat32)


@instruction(
    engine=Engine.tensor,
    reads=("stationary", "moving"),
    writes=("dst",),
    dtypes={"stationary": MATMUL_DTYPES, "moving": MATMUL_DTYPES},
    indirect=("dst", "stationary", "moving"),
)
def nc_matmul(
    call: Call,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: PerfMode = PerfMode.none,
    name: str | None = None,
) -> None:
    """dst = stationary.T @ moving, or dst += it, in float32.

    Args:
        dst: PSUM, [stationary free size, moving free size]; float32, on trn3 also bfloat16 (rounded at each write).
        is_stationary_onezero, is_moving_onezero: a float32 operand holds only ones and zeros, which is faster.
        is_transpose: with an identity as `moving`, transpose `stationary` bit for bit (from trn2 on).
        accumulate: None accumulates exactly where a location has been written before.
        tile_position, tile_size: part of the 128 x 128 array to use; both or none.
        perf_mode: double_row contracts [P, 2, F] float8 tiles over P and 2.
    """
    doubled = perf_mode is PerfMode.double_row
    bit_exact = is_transpose and call.core.target.at_least(nc_version.gen3)
    factor = 2 if doubled else 1
    rows, columns = stationary.free_size // factor, moving.free_size // factor
    if call.core.checking:
        _check_dtypes(call, dst, stationary.dtype, moving.dtype, bit_exact, doubled)
    if doubled:
        _check_double_row(call, stationary, moving, is_transpose, tile_size)
    check_sizes(call, dst, stationary, moving, (rows, columns))
    if call.core.checking and (tile_position or tile_size):
        check_tiling(call, stationary, rows, tile_position, tile_size)
    if isinstance(dst, GatheredTensor) or isinstance(stationary, GatheredTensor) or isinstance(moving, GatheredTensor):
        _check_indirection(call, dst, stationary, moving, is_transpose, tile_position)
    added = accumulates(call, dst, accumulate)
    call.work = {
        "rows": rows,
        "columns": columns,
        "contraction": stationary.shape[0] * factor,
        "accumulate": added is not False,
    }
    if call.core.computes:
        right = _as_matrix(moving, doubled)
        if bit_exact and right.shape[0] == right.shape[1] and torch.equal(right, torch.eye(columns)):
            _transpose(dst, stationary)
        else:
            put_product(dst, _as_matrix(stationary, doubled), right, added)
    if call.core.checking:
        note_matmul(dst)


def _as_matrix(tensor: NkiTensor, doubled: bool) -> torch.Tensor:
    """[contraction, free] in float32; double_row's [partitions, 2, free] contracts over the first two dimensions."""
    values = tensor.f32()
    shape = tensor.shape
    if doubled:
        return values.reshape(shape[0] * 2, -1)
    return values if len(shape) == 2 else values.reshape(shape[0], -1)


def check_sizes(
    call: Call, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, free_sizes: tuple[int, int]
) -> None:
    """Sizes of a matmul's operands, given the free sizes of the stationary and the moving one."""
    rows, columns = free_sizes
    target = call.core.target
    newest = target.at_least(nc_version.gen4)
    if moving.shape[0] != stationary.shape[0]:
        call.fail("matmul-shape", f"stationary has {stationary.shape[0]} partitions, moving {moving.shape[0]}")
    call.require(rows <= 128, "stationary-limit", f"stationary is {rows} wide, at most 128")
    limit = target.moving_limit * (2 if dst.dtype == bfloat16 and newest else 1)
    call.require(columns <= limit, "moving-limit", f"moving is {columns} wide, at most {limit} on {target.name}")
    if dst.shape[0] != rows or dst.free_size != columns:
        call.fail("matmul-shape", f"dst is {list(dst.shape)}, expected [{rows}, {columns}]")
    if not newest and call.core.checking:
        _check_bank(call, dst)


def _check_bank(call: Call, dst: NkiTensor) -> None:
    """Before trn3 one matmul writes one PSUM bank."""
    size, bank = dst.dtype.itemsize, call.core.target.psum_bank_bytes
    first = dst.offset % dst.partition_elements * size + (dst.storage.address or (0, 0))[1]
    last = first + (extent(dst.shape[1:], dst.strides[1:]) + 1) * size - 1
    call.require(first // bank == last // bank, "psum-bank", f"dst covers bytes {first} to {last} of a PSUM partition")


def check_tiling(
    call: Call, stationary: NkiTensor, rows: int, position: tuple[int, ...], size: tuple[int, ...]
) -> None:
    """A part of the 128 x 128 array: `position` and `size` both given, on the grid, no smaller than the data."""
    call.require(
        len(position) == 2 and len(size) == 2, "tile-position", f"tile_position {position} and tile_size {size}"
    )
    for start, length, axis in zip(position, size, ("row", "column"), strict=True):
        call.require(length in (32, 64, 128), "tile-position", f"{axis} size is {length}, expected 32, 64 or 128")
        if length == 32:
            call.require_target(nc_version.gen3, f"a {axis} tile of 32")
        call.require(
            start % length == 0 and start >= 0 and start + length <= 128,
            "tile-position",
            f"start {axis} {start} for {axis} size {length}",
        )
    call.require(
        stationary.shape[0] <= size[0],
        "tile-position",
        f"stationary has {stationary.shape[0]} rows, the tile {size[0]}",
    )
    call.require(rows <= size[1], "tile-position", f"stationary has {rows} columns, the tile {size[1]}")


def _check_dtypes(call: Call, dst: NkiTensor, left: DType, right: DType, bit_exact: bool, doubled: bool) -> None:
    newest = call.core.target.at_least(nc_version.gen4)
    call.require(
        (left in _FP32) == (right in _FP32),
        "operand-dtype",
        f"stationary is {left}, moving {right}: float32 and tfloat32 go with each other only",
    )
    if float8_e4m3fn in (left, right):
        call.require_target(nc_version.gen4, "float8_e4m3fn")
        call.require(float8_e4m3 not in (left, right), "operand-dtype", "float8_e4m3 and float8_e4m3fn do not mix")
    if doubled:
        call.require_target(nc_version.gen3, "double_row")
        call.require(
            left in FLOAT8 and right in FLOAT8, "operand-dtype", f"double_row takes float8, got {left} and {right}"
        )
    call.require(
        dst.dtype == float32 or (newest and dst.dtype == bfloat16) or (bit_exact and dst.dtype == left),
        "operand-dtype",
        f"dst is {dst.dtype}, expected {'float32 or bfloat16' if newest else 'float32'}"
        + (f", or {left} for a transpose" if bit_exact else ""),
    )


def _check_double_row(
    call: Call, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool, tile_size: tuple[int, ...]
) -> None:
    for operand, tensor in (("stationary", stationary), ("moving", moving)):
        if len(tensor.shape) < 3 or tensor.shape[1] != 2:
            call.fail("matmul-shape", f"{operand} is {list(tensor.shape)}, double_row expects [P, 2, F]")
    call.require(not is_transpose, "tile-position", "double_row cannot transpose")
    call.require(len(tile_size) != 2 or tile_size[1] == 128, "tile-position", "double_row cannot use column tiles")


def _check_indirection(
    call: Call,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_transpose: bool,
    tile_position: tuple[int, ...],
) -> None:
    """Limits of tensor indirection on the Tensor Engine."""
    if not call.core.checking:
        return
    call.require(
        not (is_transpose and isinstance(moving, GatheredTensor)),
        "indirect-view",
        "moving cannot use tensor indirection when is_transpose is set",
    )
    for operand, tensor in (("stationary", stationary), ("moving", moving)):
        call.require(
            not isinstance(tensor, GatheredTensor) or tensor.dtype not in _FP32,
            "operand-dtype",
            f"{operand} is {tensor.dtype}; tensor indirection takes 16- and 8-bit floats",
        )
        check_indirection_start(call, operand, tensor, tensor)
    check_indirection_start(call, "dst", dst, stationary)
    check_no_tiles(call, tile_position)


def check_no_tiles(call: Call, tile_position: tuple[int, ...]) -> None:
    """Tensor indirection is incompatible with tiling."""
    call.require(
        not tile_position or tuple(tile_position) == (0, 0),
        "tile-position",
        f"tile_position is {tile_position}; with tensor indirection it must be (0, 0) or unset",
    )


def _transpose(dst: NkiTensor, data: NkiTensor) -> None:
    """Bit-accurate transpose; dst may be wider than data."""
    if dst.dtype == data.dtype:
        dst.put_raw(data.raw.reshape(data.shape[0], -1).t())
    else:
        dst.put(data.f32().reshape(data.shape[0], -1).t())


def _transpose_engine(dst: NkiTensor, data: NkiTensor, engine: Engine, name: str | None) -> Engine:
    if engine is not Engine.unknown:
        return engine
    small = data.shape[0] <= 32 and data.free_size <= 32
    to_psum = dst.buffer is MemoryRegion.psum and data.buffer is MemoryRegion.sbuf
    return Engine.vector if small and not to_psum else Engine.tensor


@instruction(engine=_transpose_engine, engines=(Engine.tensor, Engine.vector), reads=("data",), writes=("dst",))
def nc_transpose(
    call: Call, dst: NkiTensor, data: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """dst = data.T, its free dimensions flattened; bit for bit from trn2 on.

    On the Tensor Engine from SBUF to PSUM and up to 128 x 128; on the Vector Engine up to 32 x 32, any on-chip memory.
    On trn1's Tensor Engine a NaN or infinity spreads over its row of dst, as the product with the identity gives.
    """
    unit = call.engine
    rows, columns = data.shape[0], data.free_size
    if dst.shape[0] != columns or dst.free_size != rows:
        call.fail("matmul-shape", f"dst is {list(dst.shape)}, expected [{columns}, {rows}]")
    limit = 128 if unit is Engine.tensor else 32
    call.require(
        max(rows, columns) <= limit,
        "transpose-limit",
        f"data is {rows} x {columns}, at most {limit} x {limit} on {unit.name}",
    )
    call.require(dst.dtype == data.dtype, "matching-dtype", f"dst is {dst.dtype}, data {data.dtype}")
    call.work = {"rows": columns, "columns": rows, "contraction": rows}
    if call.core.computes:
        as_product = unit is Engine.tensor and not call.core.target.at_least(nc_version.gen3)
        if as_product and data.dtype.is_float:
            dst.put(torch.mm(_as_matrix(data, False).t(), torch.eye(rows)))
        else:
            _transpose(dst, data)
    if unit is Engine.tensor and call.core.checking:
        note_matmul(dst)


__all__: list[Any] = ["nc_matmul", "nc_transpose"]
