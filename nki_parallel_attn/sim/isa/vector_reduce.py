"""Vector Engine instructions that reduce into its accumulator registers while they write.

Source: nki/api/nki/isa/__init__.py, exponential, tensor_scalar_reduce. See select.py and scan.py for the others that
share these registers.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import (
    bfloat16,
    float8_e4m3,
    float8_e5m2,
    float16,
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
from ..operand_checks import require_float32
from ..ops import add, as_operator, maximum, minimum, multiply
from ..tensor import NkiTensor
from .accumulators import accumulate, check_command
from .alu import apply_operator, arithmetic_operator, check_scalar_operand, column

_FLOATS = (float8_e4m3, float8_e5m2, float16, bfloat16, float32)
_INTEGERS = (int8, int16, int32, uint8, uint16)


@instruction(
    engine=engine.vector,
    reads=("src", "max_value", "reduce_init"),
    writes=("dst", "reduce_res"),
    elementwise=("src", "dst"),
    vectors=("max_value", "reduce_init", "reduce_res"),
    dtypes={
        "dst": (*_FLOATS, tfloat32, *_INTEGERS),
        "src": (*_FLOATS, *_INTEGERS, uint32),
        "max_value": (float32,),
        "reduce_init": (float32,),
        "reduce_res": (*_FLOATS, tfloat32),
    },
    indirect=("dst", "src"),
)
def exponential(
    call: Call,
    dst: NkiTensor,
    src: NkiTensor,
    max_value: float | NkiTensor = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_init: float | NkiTensor = 0.0,
    name: str | None = None,
) -> None:
    """dst = exp(src - max_value) in float32, and its sum over the free dimensions into the accumulators; trn3.

    Args:
        max_value: a constant or [P, 1] float32.
        reduce_cmd: idle (which leaves the accumulators undefined), reset_reduce, reduce or load_reduce.
        reduce_init: what load_reduce loads, a constant or [P, 1] float32.
        reduce_res: [P, 1] tensor that receives the accumulators.
    """
    call.require_target(nc_version.gen4, "exponential")
    for label, tensor in (("src", src), ("dst", dst)):
        call.require(
            len(tensor.shape) <= 4, "access-pattern-dims", f"{label} has {len(tensor.shape)} dimensions, at most 4"
        )
    loads = reduce_cmd is ReduceCmd.load_reduce
    commands = (ReduceCmd.idle, ReduceCmd.reset_reduce, ReduceCmd.reduce, ReduceCmd.load_reduce)
    check_command(
        call, reduce_cmd, commands, loads or isinstance(reduce_init, NkiTensor) or reduce_init != 0, "reduce_init"
    )
    result = None
    if call.core.computes:
        result = src.f32()
        if isinstance(max_value, NkiTensor) or max_value != 0:
            result = result - column(max_value, src.shape)
        result = torch.exp(result)
        dst.put(result)
    accumulate(call, reduce_cmd, add, result, reduce_res, initial=reduce_init)


@instruction(
    engine=engine.vector,
    reads=("data", "operand0", "reduce_init"),
    writes=("dst", "reduce_res"),
    elementwise=("data", "dst"),
    vectors=("operand0", "reduce_init", "reduce_res"),
    dtypes={"reduce_init": (float32,)},
    indirect=("dst", "data"),
)
def tensor_scalar_reduce(
    call: Call,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: float | NkiTensor | None,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_init: float | NkiTensor | None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> None:
    """dst = data op0 operand0 in float32, and its reduction over the free dimensions into the accumulators.

    Args:
        op0: arithmetic.
        operand0: a constant or [P, 1] float32; None or 0 when op0 is unary.
        reduce_op: nl.add, nl.multiply, nl.maximum or nl.minimum.
        reduce_cmd: reset_reduce, reduce or load_reduce.
        reduce_init: what load_reduce loads, a constant or [P, 1] float32.
        reduce_res: [P, 1] tensor that receives the accumulators, negated on request.
        reverse0: documented as not supported yet.
    """
    operator = arithmetic_operator(call, op0, inputs=None)
    check_scalar_operand(call, operator, operand0, "operand0")
    require_float32(call, "operand0", operand0)
    if reverse0:
        call.fail("operator", "reverse0 is not supported here")
    reducer = as_operator(reduce_op)
    if reducer not in (add, multiply, maximum, minimum):
        call.fail("operator", f"reduce_op is {reducer!r}, expected add, multiply, maximum or minimum")
    commands = (ReduceCmd.reset_reduce, ReduceCmd.reduce, ReduceCmd.load_reduce)
    check_command(call, reduce_cmd, commands, reduce_init is not None, "reduce_init")
    result = None
    if call.core.computes:
        result = apply_operator(operator, data.f32(), column(operand0, data.shape), False)
        dst.put(result)
    accumulate(call, reduce_cmd, reducer, result, reduce_res, initial=reduce_init, negate=reduce_res_negate)
