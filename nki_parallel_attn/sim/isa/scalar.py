"""Instructions of the Scalar Engine. Source: nki/api/nki/isa/__init__.py; nki/api/nki.api.shared.rst for functions."""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import as_float32, tfloat32
from ..enums import engine, nc_version
from ..enums import reduce_cmd as ReduceCmd
from ..instruction import Call, instruction
from ..operand_checks import require_float32
from ..ops import (
    Operator,
    abs_max,
    abs_min,
    add,
    as_operator,
    bypass,
    maximum,
    minimum,
    multiply,
    prelu,
    reciprocal,
    subtract,
)
from ..tensor import NkiTensor
from .accumulators import accumulate, check_command
from .alu import flat

_COMMANDS = (ReduceCmd.idle, ReduceCmd.reset, ReduceCmd.reduce, ReduceCmd.reset_reduce)
_REDUCING = (ReduceCmd.reduce, ReduceCmd.reset_reduce)


def check_range(call: Call, function: Operator, values: torch.Tensor) -> None:
    """Refuse inputs for which the engine's approximation of `function` is invalid."""
    if function.valid is None or not call.core.checks.activation_range:
        return
    low, high = function.valid
    inputs = values.abs() if function is reciprocal else values
    outside = (inputs < low) | (inputs > high)
    if bool(outside.any()):
        worst = float(values[outside][0])
        call.fail(
            "activation-range", f"{function.name} of {worst:g} on the Scalar Engine; it is valid in [{low:g}, {high:g}]"
        )


def _activate(call: Call, dst: NkiTensor, function: Operator, data: NkiTensor, bias: Any, scale: Any) -> torch.Tensor:
    """dst = function(data * scale + bias); the float32 result before rounding, [P, N]."""
    values = flat(data)
    if isinstance(scale, NkiTensor):
        values = values * scale.f32().reshape(-1, 1)
    elif scale != 1.0:
        values = values * as_float32(scale)
    if isinstance(bias, NkiTensor):
        values = values + bias.f32().reshape(-1, 1)
    elif bias:
        values = values + as_float32(bias)
    check_range(call, function, values)
    result = function.compute(values)
    dst.put(result)
    return result


def _activation_function(call: Call, op: Any) -> Operator:
    function = as_operator(op)
    if not function.activation:
        call.fail("operator", f"{function!r} is not an activation function")
    return function


def _check(call: Call, op: Any, data: NkiTensor, bias: Any, scale: Any) -> Operator:
    function = _activation_function(call, op)
    require_float32(call, "scale", scale)
    if isinstance(bias, NkiTensor):
        call.require(bias.dtype != tfloat32, "operand-dtype", "bias is tfloat32, which activation does not take")
    elif bias is not None:
        call.require_target(nc_version.gen3, "a constant bias")
    return function


@instruction(
    engine=engine.scalar,
    reads=("data", "bias", "scale"),
    writes=("dst", "reduce_res"),
    elementwise=("data", "dst"),
    vectors=("bias", "scale", "reduce_res"),
    indirect=("dst", "data"),
)
def activation(
    call: Call,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: float | NkiTensor | None = None,
    scale: float | NkiTensor = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    name: str | None = None,
) -> None:
    """dst = op(data * scale + bias) in float32, with an optional sum over the free dimensions into the accumulators.

    Args:
        op: an activation function; nl.prelu has slope 0 here.
        bias, scale: constants or [P, 1] tensors.
        reduce_op: nl.add.
        reduce_cmd: what happens to the accumulators; load_reduce does not exist here.
        reduce_res: [P, 1] tensor that receives the accumulators.
    """
    function = _check(call, op, data, bias, scale)
    accumulates = reduce_cmd is not ReduceCmd.idle or reduce_res is not None
    if accumulates or reduce_op is not None:
        call.require(
            reduce_op is None or as_operator(reduce_op) is add,
            "reduce-register",
            f"reduce_op {reduce_op!r}, expected nl.add",
        )
        check_command(call, reduce_cmd, _COMMANDS)
        reduces = reduce_cmd in _REDUCING
        call.require(not reduces or reduce_op is not None, "reduce-register", f"{reduce_cmd.name} needs reduce_op")
    result = _activate(call, dst, function, data, bias, scale) if call.core.computes else None
    if accumulates:
        accumulate(call, reduce_cmd, add, result, reduce_res)


@instruction(
    engine=engine.scalar,
    reads=("data", "bias", "scale"),
    writes=("dst", "reduce_res"),
    elementwise=("data", "dst"),
    vectors=("bias", "scale", "reduce_res"),
    indirect=("dst", "data"),
)
def activation_reduce(
    call: Call,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    bias: float | NkiTensor | None = None,
    scale: float | NkiTensor = 1.0,
    name: str | None = None,
) -> None:
    """activation with the accumulators reset, reduced into, and read out to `reduce_res` unless that is None."""
    function = _check(call, op, data, bias, scale)
    reducer = as_operator(reduce_op)
    call.require(reducer in (add, maximum), "reduce-register", f"reduce_op {reducer!r}, expected nl.add or nl.maximum")
    result = _activate(call, dst, function, data, bias, scale) if call.core.computes else None
    accumulate(call, ReduceCmd.reset_reduce, reducer, result, reduce_res)


_PAIRS = (
    (multiply, add),
    (multiply, subtract),
    (multiply, bypass),
    (add, bypass),
    (subtract, bypass),
    (bypass, bypass),
)
_REDUCERS = (add, maximum, minimum, abs_max, abs_min)


@instruction(
    engine=engine.scalar,
    reads=("data", "imm0", "imm1", "relu_param"),
    writes=("dst", "reduce_res"),
    elementwise=("data", "dst"),
    vectors=("imm0", "imm1", "relu_param", "reduce_res"),
    indirect=("dst", "data"),
)
def activate2(
    call: Call,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: float | NkiTensor,
    imm1: float | NkiTensor,
    op0: Any,
    op1: Any,
    relu_param: float | NkiTensor = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    name: str | None = None,
) -> None:
    """dst = op((data op0 imm0) op1 imm1) in float32, with an optional reduction into the accumulators; trn3.

    Args:
        imm0, imm1: constants or [P, 1] tensors, of one dtype when both are tensors.
        op0, op1: (multiply, add), (multiply, subtract), or (multiply, add, subtract or bypass) with bypass.
        relu_param: slope of nl.prelu for negative inputs, a constant or [P, 1].
        reverse0, reverse1: put the constant on the left.
        reduce_op: nl.add, nl.maximum, nl.minimum, nl.abs_max or nl.abs_min.
        reduce_cmd: idle, reset, reduce or reset_reduce.
        reduce_res: [P, 1] tensor that receives the accumulators.
    """
    call.require_target(nc_version.gen4, "activate2")
    function = _activation_function(call, op)
    first, second = as_operator(op0), as_operator(op1)
    if (first, second) not in _PAIRS:
        call.fail("operator", f"op0, op1 are {first!r}, {second!r}, not one of the documented pairs")
    for reverse, operator, label in ((reverse0, first, "0"), (reverse1, second, "1")):
        call.require(not reverse or operator is not bypass, "operator", f"reverse{label} needs op{label}")
    if isinstance(imm0, NkiTensor) and isinstance(imm1, NkiTensor):
        call.require(imm0.dtype == imm1.dtype, "matching-dtype", f"imm0 is {imm0.dtype}, imm1 {imm1.dtype}")
    check_command(call, reduce_cmd, _COMMANDS)
    reducer = add if reduce_op is None else as_operator(reduce_op)
    if reducer not in _REDUCERS:
        call.fail("operator", f"reduce_op is {reducer!r}, expected add, maximum, minimum, abs_max or abs_min")
    reduces = reduce_cmd in _REDUCING
    call.require(not reduces or reduce_op is not None, "reduce-register", f"{reduce_cmd.name} needs reduce_op")
    result = None
    if call.core.computes:
        values = flat(data)
        for operator, value, reverse in ((first, imm0, reverse0), (second, imm1, reverse1)):
            if operator is not bypass:
                operand = _per_partition(value)
                values = operator.compute(operand, values) if reverse else operator.compute(values, operand)
        check_range(call, function, values)
        result = function.compute(values, _per_partition(relu_param)) if function is prelu else function.compute(values)
        dst.put(result)
    if reduce_cmd is not ReduceCmd.idle or reduce_res is not None:
        accumulate(call, reduce_cmd, reducer, result, reduce_res)


def _per_partition(value: float | NkiTensor) -> Any:
    """A number, or float32 [P, 1]."""
    return value.f32().reshape(-1, 1) if isinstance(value, NkiTensor) else as_float32(value)
