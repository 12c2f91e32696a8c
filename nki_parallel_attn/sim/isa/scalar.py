"""Instructions of the Scalar Engine. Source: nki/api/nki/isa/__init__.py, activation and activation_reduce."""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import as_float32, tfloat32
from ..enums import engine, nc_version
from ..enums import reduce_cmd as ReduceCmd
from ..instruction import Call, instruction
from ..operand_checks import require_float32
from ..ops import Operator, add, as_operator, maximum, prelu, reciprocal
from ..tensor import NkiTensor
from .accumulators import Accumulators


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
    """dst = function(data * scale + bias); the float32 result before rounding."""
    values = data.f32()
    if len(data.shape) > 2:
        values = values.reshape(data.shape[0], -1)
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


def _check(call: Call, op: Any, data: NkiTensor, bias: Any, scale: Any) -> Operator:
    function = as_operator(op)
    if not function.activation or function is prelu:
        call.fail("operator", f"{function!r} is not an activation function of this instruction")
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
        bias, scale: constants or [P, 1] tensors.
        reduce_op: nl.add.
        reduce_cmd: what happens to the accumulators; load_reduce does not exist here.
        reduce_res: [P, 1] tensor that receives the accumulators.
    """
    function = _check(call, op, data, bias, scale)
    if reduce_cmd is not ReduceCmd.idle or reduce_res is not None or reduce_op is not None:
        call.require(
            reduce_op is None or as_operator(reduce_op) is add,
            "reduce-register",
            f"reduce_op {reduce_op!r}, expected nl.add",
        )
        call.require(reduce_cmd is not ReduceCmd.load_reduce, "reduce-register", "activation has no load_reduce")
        reduces = reduce_cmd in (ReduceCmd.reduce, ReduceCmd.reset_reduce)
        call.require(not reduces or reduce_op is not None, "reduce-register", f"{reduce_cmd.name} needs reduce_op")
    result = _activate(call, dst, function, data, bias, scale) if call.core.computes else None
    if reduce_cmd is ReduceCmd.idle and reduce_res is None:
        return
    registers = Accumulators.of(call)
    if reduce_cmd is not ReduceCmd.idle:
        reduces = result is not None and reduce_cmd is not ReduceCmd.reset
        registers.update(call, reduce_cmd, add, result.sum(-1) if reduces and result is not None else None)
    if reduce_res is not None:
        registers.read(call, reduce_res)


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
    reduced = None
    if call.core.computes:
        assert reducer.reduce is not None
        reduced = reducer.reduce(_activate(call, dst, function, data, bias, scale))
    registers = Accumulators.of(call)
    registers.update(call, ReduceCmd.reset_reduce, reducer, reduced)
    if reduce_res is not None:
        registers.read(call, reduce_res)
