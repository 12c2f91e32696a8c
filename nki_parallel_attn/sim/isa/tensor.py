"""Instructions of the Tensor Engine. Source: nki/api/nki/isa/__init__.py, nc_matmul and nc_transpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..dtypes import FLOAT8, FLOAT32, bfloat16, float8_e4m3, float8_e4m3fn, float8_e5m2, float16, float32, tfloat32
from ..enums import MemoryRegion, nc_version
from ..enums import engine as Engine
from ..enums import matmul_perf_mode as PerfMode
from ..instruction import Call, instruction
from ..layout import extent
from ..tensor import NkiTensor

MATMUL_DTYPES = (float8_e4m3, float8_e5m2, float8_e4m3fn, bfloat16, float16, tfloat32, float32)
_FP32 = (float32, tfloat32)


def _as_matrix(tensor: NkiTensor, doubled: bool) -> torch.Tensor:
    """[contraction, free] in float32; double_row's [partitions, 2, free] contracts over the first two dimensions."""
    values = tensor.f32()
    shape = tensor.shape
    if doubled:
        return values.reshape(shape[0] * 2, -1)
    return values if len(shape) == 2 else values.reshape(shape[0], -1)


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
        is_transpose: with an identity as `moving`, transpose `stationary` bit for bit (from trn2 on).
        accumulate: None accumulates exactly where a location has been written before.
        tile_position, tile_size: part of the 128 x 128 array to use; both or none.
        perf_mode: double_row contracts [P, 2, F] float8 tiles over P and 2.
    """
    doubled = perf_mode is PerfMode.double_row
    rows, columns, contraction = _sizes(call, stationary, moving, doubled)
    if call.core.checking:
        _check_matmul(call, dst, stationary, moving, doubled, is_transpose, (rows, columns))
        _check_tiling(call, stationary, rows, doubled, tile_position, tile_size)
    if dst.shape[0] != rows or dst.free_size != columns:
        call.fail("matmul-shape", f"dst is {list(dst.shape)}, expected [{rows}, {columns}]")
    call.work = {"rows": rows, "columns": columns, "contraction": contraction}
    added = _accumulates(call, dst, accumulate)
    call.work["accumulate"] = added is not False
    if call.core.computes:
        right = _as_matrix(moving, doubled)
        exact = is_transpose and call.core.target.at_least(nc_version.gen3)
        if exact and right.shape[0] == right.shape[1] and torch.equal(right, torch.eye(columns)):
            _transpose_exact(dst, stationary)
        else:
            _multiply(dst, _as_matrix(stationary, doubled), right, added)
    _mark_matmul(dst)


def _sizes(call: Call, stationary: NkiTensor, moving: NkiTensor, doubled: bool) -> tuple[int, int, int]:
    """Width of the stationary tile, width of the moving tile, and contraction length."""
    partitions = stationary.shape[0]
    if moving.shape[0] != partitions:
        call.fail("matmul-shape", f"stationary has {partitions} partitions, moving {moving.shape[0]}")
    factor = 1
    if doubled:
        factor = 2
        for operand, tensor in (("stationary", stationary), ("moving", moving)):
            if len(tensor.shape) < 3 or tensor.shape[1] != 2:
                call.fail("matmul-shape", f"{operand} is {list(tensor.shape)}, double_row expects [P, 2, F]")
    return stationary.free_size // factor, moving.free_size // factor, partitions * factor


def _check_matmul(
    call: Call,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    doubled: bool,
    is_transpose: bool,
    size: tuple[int, int],
) -> None:
    target = call.core.target
    newest = target.at_least(nc_version.gen4)
    left, right = stationary.dtype, moving.dtype
    call.require(size[0] <= 128, "stationary-limit", f"stationary is {size[0]} wide, at most 128")
    limit = target.moving_limit * (2 if dst.dtype == bfloat16 and newest else 1)
    call.require(size[1] <= limit, "moving-limit", f"moving is {size[1]} wide, at most {limit} on {target.name}")
    if not newest:
        _check_bank(call, dst)
    if not is_transpose:
        call.require(
            (left in _FP32) == (right in _FP32),
            "operand-dtype",
            f"stationary {left} with moving {right}: float32 needs float32",
        )
        call.require(
            dst.dtype == float32 or (newest and dst.dtype == bfloat16),
            "operand-dtype",
            f"dst is {dst.dtype} on {target.name}",
        )
    if float8_e4m3fn in (left, right):
        call.require_target(nc_version.gen4, "float8_e4m3fn")
        call.require(float8_e4m3 not in (left, right), "operand-dtype", "float8_e4m3 and float8_e4m3fn do not mix")
    if doubled:
        call.require_target(nc_version.gen3, "double_row")
        call.require(
            left in FLOAT8 and right in FLOAT8, "operand-dtype", f"double_row takes float8, got {left} and {right}"
        )
        call.require(not is_transpose, "tile-position", "double_row cannot transpose")


def _check_bank(call: Call, dst: NkiTensor) -> None:
    """Before trn3 one matmul writes one PSUM bank."""
    size, bank = dst.dtype.itemsize, call.core.target.psum_bank_bytes
    first = dst.offset % dst.partition_elements * size + (dst.storage.address or (0, 0))[1]
    last = first + (extent(dst.shape[1:], dst.strides[1:]) + 1) * size - 1
    call.require(first // bank == last // bank, "psum-bank", f"dst covers bytes {first} to {last} of a PSUM partition")


def _check_tiling(
    call: Call, stationary: NkiTensor, rows: int, doubled: bool, position: tuple[int, ...], size: tuple[int, ...]
) -> None:
    if not position and not size:
        return
    call.require(
        len(position) == 2 and len(size) == 2, "tile-position", f"tile_position {position} and tile_size {size}"
    )
    for start, length, axis in zip(position, size, ("row", "column"), strict=True):
        call.require(length in (32, 64, 128), "tile-position", f"{axis} size is {length}")
        call.require(
            start % length == 0 and start + length <= 128, "tile-position", f"start {axis} {start} for size {length}"
        )
    call.require(
        stationary.shape[0] <= size[0],
        "tile-position",
        f"stationary has {stationary.shape[0]} rows, the tile {size[0]}",
    )
    call.require(rows <= size[1], "tile-position", f"stationary has {rows} columns, the tile {size[1]}")
    call.require(not (doubled and size[1] != 128), "tile-position", "double_row cannot use column tiles")


def _accumulates(call: Call, dst: NkiTensor, accumulate: bool | None) -> bool | torch.Tensor:
    """Whether to add to dst: everywhere, nowhere, or at the True elements of a mask."""
    if accumulate is not None and not accumulate:
        return False
    if accumulate is None and call.core.shadowing:
        storage = dst.storage
        if not storage.full:
            flags = dst.flag_view(storage.flags(dst.dtype.itemsize), storage.grain)
            if not flags.any():
                return False
            if not flags.all():
                _check_source(call, dst, None)
                return torch.from_numpy(np.ascontiguousarray(flags if flags.ndim == len(dst.shape) else flags[..., 0]))
    elif accumulate is None:
        return _by_matmul(dst)
    _check_source(call, dst, accumulate)
    call.reads.append(dst)
    return True


def _by_matmul(dst: NkiTensor) -> bool | torch.Tensor:
    """Where matmuls have written; stands in for the written-flags when those are off."""
    state = dst.storage.by_matmul
    if isinstance(state, bool):
        return state
    mine = dst.flag_view(state, 1)
    mine = mine if mine.ndim == len(dst.shape) else mine[..., 0]
    if mine.all():
        return True
    return torch.from_numpy(np.ascontiguousarray(mine)) if mine.any() else False


def _check_source(call: Call, dst: NkiTensor, accumulate: bool | None) -> None:
    if not call.core.checking:
        return
    if accumulate and dst.unwritten() is not None:
        call.fail("psum-accumulate", f"accumulate=True onto {dst.name}, parts of which no matmul has initialised")
    if call.core.target.at_least(nc_version.gen4) or _by_matmul(dst) is True:
        return
    # Zeros from memset are the documented idiom for a fresh accumulator: adding to them is overwriting them.
    if accumulate or bool((dst.f32() != 0).any()):
        call.fail("psum-accumulate", f"{dst.name} was initialised by another instruction than a matmul")


def _mark_matmul(dst: NkiTensor) -> None:
    storage = dst.storage
    if storage.by_matmul is True:
        return
    if dst.covers_storage:
        storage.by_matmul = True
        return
    if isinstance(storage.by_matmul, bool):
        size = len(storage.arena.written) if storage.arena is not None else storage.elements * storage.dtype.itemsize
        storage.by_matmul = np.zeros(size, dtype=np.bool_)
    dst.flag_view(storage.by_matmul, 1)[...] = True


def _multiply(dst: NkiTensor, left: torch.Tensor, right: torch.Tensor, added: bool | torch.Tensor) -> None:
    target = dst.target()
    if dst.format is FLOAT32 and len(dst.shape) == 2 and type(dst) is NkiTensor and isinstance(added, bool):
        if added:
            target.addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=target)
        return
    product = torch.mm(left.t(), right).reshape(dst.shape)
    if added is not False:
        current = dst.f32()
        product = product + (current if added is True else torch.where(added, current, 0.0))
    dst.put(product)


def _transpose_exact(dst: NkiTensor, data: NkiTensor) -> None:
    """Bit-accurate transpose; dst may be wider than data."""
    values = data.raw.reshape(data.shape[0], -1).t()
    if dst.dtype == data.dtype:
        dst.put_raw(values)
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
    if call.core.computes:
        _transpose_exact(dst, data)


__all__: list[Any] = ["nc_matmul", "nc_transpose"]
