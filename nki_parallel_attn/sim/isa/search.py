"""Largest elements and where they are: max8 and its companions on the Vector Engine, topk on GpSimd.

Source: nki/api/nki/isa/__init__.py, max8, nc_find_index8, nc_match_replace8, topk.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ..dtypes import as_float32, bfloat16, uint16, uint32
from ..enums import engine
from ..instruction import Call, instruction
from ..operand_checks import require_same_partitions
from ..tensor import NkiTensor
from .alu import flat, put_bits
from .gpsimd import PARTITIONS_PER_CORE

_FOUND_AT_ONCE = 8
_INDICES = (uint16, uint32)


def _check_searched(call: Call, operand: str, tensor: NkiTensor) -> None:
    size = tensor.free_size
    if not 8 <= size <= 16384:
        call.fail("max8-size", f"{operand} has {size} elements per partition, expected 8 to 16384")
    if len(tensor.shape) > 3:
        call.fail("max8-size", f"{operand} has {len(tensor.shape)} dimensions, at most 3")


def _check_eight(call: Call, operand: str, tensor: NkiTensor, dimensions: int) -> None:
    if tensor.free_size != _FOUND_AT_ONCE or len(tensor.shape) > dimensions:
        call.fail(
            "max8-size",
            f"{operand} is {list(tensor.shape)}, expected 8 elements per partition in at most {dimensions} dimensions",
        )


@instruction(engine=engine.vector, reads=("src",), writes=("dst",))
def max8(call: Call, dst: NkiTensor, src: NkiTensor, name: str | None = None) -> None:
    """dst [P, 8] = the eight largest elements of each partition of src, in descending order."""
    require_same_partitions(call, src=src, dst=dst)
    _check_searched(call, "src", src)
    _check_eight(call, "dst", dst, 2)
    if call.core.computes:
        dst.put(flat(src).topk(_FOUND_AT_ONCE).values)


@instruction(engine=engine.vector, reads=("data", "vals"), writes=("dst",), dtypes={"dst": _INDICES})
def nc_find_index8(call: Call, dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> None:
    """dst [P, 8] = position in each partition of data of the first element equal to each of vals; all ones if none is.

    Equal values take successive positions, from left to right.

    Args:
        dst: uint16 or uint32.
        vals: 8 per partition.
    """
    require_same_partitions(call, data=data, vals=vals, dst=dst)
    _check_searched(call, "data", data)
    _check_eight(call, "vals", vals, 3)
    _check_eight(call, "dst", dst, 2)
    if call.core.computes:
        put_bits(dst, _match(flat(data), flat(vals), range(_FOUND_AT_ONCE)))


@instruction(
    engine=engine.vector,
    reads=("data", "vals"),
    writes=("dst", "dst_idx"),
    elementwise=("data", "dst"),
    dtypes={"dst_idx": _INDICES},
)
def nc_match_replace8(
    call: Call,
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> None:
    """dst = data with the first element equal to each of vals replaced by `imm`; dst_idx [P, 8] = their positions.

    Equal values take successive positions from right to left; what is not found has all ones for a position.

    Args:
        vals: 8 per partition.
        dst_idx: uint16 or uint32.
    """
    require_same_partitions(call, data=data, vals=vals, dst_idx=dst_idx)
    _check_eight(call, "vals", vals, 3)
    if dst_idx is not None:
        _check_eight(call, "dst_idx", dst_idx, 3)
    if not isinstance(imm, (int, float)):
        call.fail("scalar-operand", f"imm is {imm!r}, expected a number")
    if not call.core.computes:
        return
    values = flat(data)
    places = _match(values, flat(vals), reversed(range(_FOUND_AT_ONCE)))
    # A column beyond the last takes what was not found.
    result = torch.nn.functional.pad(values, (0, 1))
    result.scatter_(1, torch.where(places < 0, values.shape[1], places), as_float32(imm))
    dst.put(result[:, :-1])
    if dst_idx is not None:
        put_bits(dst_idx, places)


def _match(values: torch.Tensor, wanted: torch.Tensor, columns: Iterable[int]) -> torch.Tensor:
    """For each column of `wanted`, in turn, its first position in `values` that no other column took; -1 if none."""
    # NumPy finds the first True of a row much faster than torch does.
    remaining, targets = values.numpy().copy(), wanted.numpy()
    rows = np.arange(remaining.shape[0])
    places = np.empty(targets.shape, np.int64)
    for column in columns:
        place = (remaining == targets[:, column : column + 1]).argmax(1)
        candidate = remaining[rows, place]
        found = candidate == targets[:, column]
        remaining[rows, place] = np.where(found, np.nan, candidate)
        places[:, column] = np.where(found, place, -1)
    return torch.from_numpy(places)


@instruction(
    engine=engine.gpsimd,
    reads=("src",),
    writes=("val_dst", "idx_dst"),
    dtypes={"src": (bfloat16,), "val_dst": (bfloat16,), "idx_dst": (uint32,)},
    deferred_read=True,
)
def topk(call: Call, val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int, name: str | None = None) -> None:
    """The K largest of the n elements that each 16 partitions of src hold, ascending, and their positions.

    Element i is in partition i % 16, column i // 16 of its group. Each partition of a group gets the same results. Of
    equal elements the one with the lower position ranks higher.

    Args:
        val_dst: bfloat16 [P, K].
        idx_dst: uint32 [P, K].
        src: bfloat16 [P, at least ceil(n / 16)].
    """
    require_same_partitions(call, src=src, val_dst=val_dst, idx_dst=idx_dst)
    partitions, k, columns = src.shape[0], val_dst.free_size, -(-n // PARTITIONS_PER_CORE)
    sizes = f"n={n}, K={k}, src {list(src.shape)}"
    if not (8 <= n < 65536 and 1 <= k < 32768 and k <= n) or partitions % PARTITIONS_PER_CORE:
        call.fail("topk-size", sizes)
    if src.free_size < columns or idx_dst.free_size != k:
        call.fail("topk-size", f"{sizes}, idx_dst {list(idx_dst.shape)}")
    active = src.reshape((partitions, src.free_size))[:, 0:columns] if len(src.shape) > 2 else src[:, 0:columns]
    if call.core.checks.uninitialised:
        call.check_written("src", active)
    if not call.core.computes:
        return
    groups = active.f32().reshape(-1, PARTITIONS_PER_CORE, columns).transpose(1, 2)
    snake = groups.reshape(groups.shape[0], -1)[:, :n]
    order = snake.sort(descending=True, stable=True)
    values, places = (
        part[:, :k].flip(1).repeat_interleave(PARTITIONS_PER_CORE, 0) for part in (order.values, order.indices)
    )
    val_dst.put(values)
    put_bits(idx_dst, places)
