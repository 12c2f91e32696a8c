"""Vector Engine instructions that choose between values element by element.

Source: nki/api/nki/isa/__init__.py, tensor_copy_predicated, select_reduce, range_select.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..dtypes import (
    ALL,
    PACKED,
    as_float32,
    bool_,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from ..enums import engine, nc_version
from ..enums import reduce_cmd as ReduceCmd
from ..instruction import Call, instruction
from ..ops import as_operator, maximum, not_equal
from ..tensor import NkiTensor
from .accumulators import accumulate, check_command
from .alu import COMPARISONS, column, constant, flat

FP32_MIN = float(np.finfo(np.float32).min)
_FLOATS = tuple(dtype for dtype in ALL if dtype.is_float)


@instruction(
    engine=engine.vector,
    reads=("src", "predicate"),
    writes=("dst",),
    elementwise=("dst", "predicate", "src"),
    not_both_psum=("src", "predicate"),
    dtypes={"predicate": (uint8, uint16, uint32, bool_)},
    indirect=("dst", "predicate"),
)
def tensor_copy_predicated(
    call: Call,
    dst: NkiTensor,
    src: float | NkiTensor,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = src, bit for bit, where predicate is not 0 (where it is 0 when reversed); dst keeps the other elements.

    Args:
        src: a tensor of dst's dtype, or a number.
        predicate: unsigned integers.
    """
    if isinstance(src, NkiTensor) and src.dtype != dst.dtype:
        call.fail("matching-dtype", f"src is {src.dtype}, dst {dst.dtype}")
    if not call.core.computes:
        return
    chosen = (predicate.bits() == 0 if reverse_pred else predicate.bits() != 0).reshape(dst.shape)
    kept = dst.bits()
    values = src.bits().reshape(dst.shape) if isinstance(src, NkiTensor) else constant(dst, src).view(kept.dtype)
    dst.put_raw(torch.where(chosen, values, kept).view(dst.format.torch))
    call.mark_written_where(dst, chosen)


@instruction(
    engine=engine.vector,
    reads=("predicate", "on_true", "on_false"),
    writes=("dst", "reduce_res"),
    elementwise=("on_true", "predicate", "dst"),
    vectors=("on_false", "reduce_res"),
    not_both_psum=("on_true", "predicate"),
    dtypes={
        "predicate": (int8, uint8, int16, uint16, bool_),
        "on_true": tuple(dtype for dtype in ALL if dtype not in (tfloat32, int32, uint32, *PACKED)),
        "reduce_res": _FLOATS,
    },
)
def select_reduce(
    call: Call,
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: float | NkiTensor,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_op: Any = maximum,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = on_true where predicate is not 0 (where it is 0 when reversed), else on_false; and the running maximum.

    Args:
        on_false: a constant or [P, 1].
        reduce_cmd: idle (which leaves the accumulators undefined), reset_reduce or reduce.
        reduce_op: nl.maximum.
        reduce_res: [P, 1] float tensor that receives the accumulators.
    """
    _check_maximum(call, reduce_op)
    check_command(call, reduce_cmd, (ReduceCmd.idle, ReduceCmd.reset_reduce, ReduceCmd.reduce))
    result = None
    if call.core.computes:
        chosen = (predicate.bits() == 0 if reverse_pred else predicate.bits() != 0).reshape(on_true.shape)
        result = torch.where(chosen, on_true.f32(), column(on_false, on_true.shape))
        dst.put(result)
    accumulate(call, reduce_cmd, maximum, result, reduce_res)


@instruction(
    engine=engine.vector,
    reads=("on_true_tile", "bound0", "bound1"),
    writes=("dst", "reduce_res"),
    elementwise=("on_true_tile", "dst"),
    vectors=("bound0", "bound1", "reduce_res"),
    dtypes={"on_true_tile": _FLOATS, "bound0": (float32,), "bound1": (float32,)},
)
def range_select(
    call: Call,
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = maximum,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where index comp_op0 bound0 and index comp_op1 bound1, else the smallest float32.

    The index is range_start plus the position in the free dimensions. The maximum of the results, before rounding,
    goes into the accumulators.

    Args:
        bound0, bound1: [P, 1] float32.
        comp_op0, comp_op1: nl.equal, nl.less, nl.less_equal, nl.greater or nl.greater_equal.
        reduce_cmd: idle, reset, reduce or reset_reduce.
        reduce_op: nl.maximum.
        reduce_res: [P, 1] tensor that receives the accumulators.
        range_start: range_start plus position stays within 2**24.
        on_false_value: -3.4028235e+38, the only value the hardware has.
    """
    call.require_target(nc_version.gen3, "range_select")
    first, second = as_operator(comp_op0), as_operator(comp_op1)
    for operator in (first, second):
        if operator not in COMPARISONS or operator is not_equal:
            call.fail("operator", f"{operator!r}, expected equal, less, less_equal, greater or greater_equal")
    call.require(
        as_float32(on_false_value) == FP32_MIN,
        "range-select-false-value",
        f"on_false_value is {on_false_value}, expected {FP32_MIN}",
    )
    elements = on_true_tile.free_size
    call.require(
        range_start >= -(2**24) and range_start + elements - 1 <= 2**24,
        "range-select-index",
        f"indices run from {range_start} to {range_start + elements - 1}",
    )
    _check_maximum(call, reduce_op)
    check_command(call, reduce_cmd, (ReduceCmd.idle, ReduceCmd.reset, ReduceCmd.reduce, ReduceCmd.reset_reduce))
    result = None
    if call.core.computes:
        index = torch.arange(range_start, range_start + elements, dtype=torch.float32)
        low = COMPARISONS[first](index, bound0.f32().reshape(-1, 1))
        high = COMPARISONS[second](index, bound1.f32().reshape(-1, 1))
        result = torch.where(low.logical_and_(high), flat(on_true_tile), FP32_MIN)
        dst.put(result)
    accumulate(call, reduce_cmd, maximum, result, reduce_res)


def _check_maximum(call: Call, reduce_op: Any) -> None:
    if as_operator(reduce_op) is not maximum:
        call.fail("operator", f"reduce_op is {reduce_op!r}, expected nl.maximum")
