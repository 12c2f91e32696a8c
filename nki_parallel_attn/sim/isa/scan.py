"""Running results along the free dimension, on the Vector Engine.

Source: nki/api/nki/isa/__init__.py, tensor_tensor_scan, tensor_scalar_cumulative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..dtypes import (
    as_float32,
    bfloat16,
    float8_e4m3,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    int8,
    int16,
    uint8,
    uint16,
)
from ..enums import engine
from ..enums import reduce_cmd as ReduceCmd
from ..instruction import Call, instruction
from ..ops import Operator, add, maximum, minimum, multiply, subtract
from ..tensor import NkiTensor
from .accumulators import Accumulators, check_command
from .alu import apply_operator, arithmetic_operator, check_scalar_operand, flat

Row = np.ndarray[Any, np.dtype[np.float32]]
Step = Callable[..., Any]

# A scan makes two calls per column on 128 numbers, where the overhead of a call is all that counts; NumPy's is smaller.
_STEPS: dict[Operator, Step] = {
    add: np.add,
    subtract: np.subtract,
    multiply: np.multiply,
    maximum: np.maximum,
    minimum: np.minimum,
}


def _step(operator: Operator, reverse: bool) -> Step:
    """A function (a, b, out) that writes `a operator b`, or `b operator a` when reversed."""
    known = _STEPS.get(operator)
    if known is None:

        def known(a: Row, b: Row, out: Row) -> Any:
            out[...] = operator.compute(torch.from_numpy(a), torch.from_numpy(b)).numpy()

    if not reverse:
        return known
    forward = known
    return lambda a, b, out: forward(b, a, out=out)


@instruction(
    engine=engine.vector,
    reads=("data0", "data1", "initial"),
    writes=("dst",),
    elementwise=("data0", "data1", "dst"),
    vectors=("initial",),
    not_both_psum=("data0", "data1"),
)
def tensor_tensor_scan(
    call: Call,
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: float | NkiTensor,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst[i] = (data0[i] op0 dst[i - 1]) op1 data1[i] along the free dimension, starting from `initial`.

    The state is kept in float32, whatever dst's dtype. Both operators are binary arithmetic; `reverse0` puts data0 on
    the right of op0, `reverse1` data1 on the left of op1.

    Args:
        initial: a constant or [P, 1].
    """
    first, second = arithmetic_operator(call, op0), arithmetic_operator(call, op1)
    if not call.core.computes:
        return
    left, right = (flat(data).t().contiguous().numpy() for data in (data0, data1))
    result = np.empty_like(left)
    middle = np.empty_like(left[0])
    if isinstance(initial, NkiTensor):
        state: Row = initial.f32().reshape(-1).numpy()
    else:
        state = np.full_like(middle, as_float32(initial))
    apply0, apply1 = _step(first, reverse0), _step(second, reverse1)
    with np.errstate(all="ignore"):
        for a, b, out in zip(left, right, result, strict=True):
            apply0(a, state, out=middle)
            apply1(middle, b, out=out)
            state = out
    dst.put(torch.from_numpy(result).t().reshape(dst.shape))


_NARROW = (bfloat16, float16, float32, float8_e4m3, float8_e4m3fn, float8_e5m2, uint8, uint16, int8, int16)


@instruction(
    engine=engine.vector,
    reads=("src", "imm0", "imm1"),
    writes=("dst",),
    elementwise=("src", "dst"),
    vectors=("imm0", "imm1"),
    dtypes={"dst": _NARROW, "src": _NARROW, "imm0": (float32,), "imm1": (float32,)},
    indirect=("dst", "src"),
)
def tensor_scalar_cumulative(
    call: Call,
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: float | NkiTensor | None,
    imm1: float | NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    name: str | None = None,
) -> None:
    """dst[i] = (src[i] op0 imm0) op1 dst[i - 1] along the free dimension, in the accumulators.

    Args:
        op0: arithmetic.
        op1: nl.add, nl.subtract, nl.multiply, nl.maximum or nl.minimum.
        imm0: a constant or [P, 1] float32.
        imm1: what load_reduce loads, a constant or [P, 1] float32.
        reduce_cmd: reset_reduce, reduce or load_reduce.
    """
    first = arithmetic_operator(call, op0, inputs=None)
    check_scalar_operand(call, first, imm0, "imm0")
    second = arithmetic_operator(call, op1)
    if second not in _STEPS:
        call.fail("operator", f"op1 is {second!r}, expected add, subtract, multiply, maximum or minimum")
    commands = (ReduceCmd.reset_reduce, ReduceCmd.reduce, ReduceCmd.load_reduce)
    check_command(call, reduce_cmd, commands, imm1 is not None, "imm1")
    registers = Accumulators.of(call).start(call, reduce_cmd, second, imm1)
    if not call.core.computes:
        return
    operand = imm0.f32().reshape(-1, 1) if isinstance(imm0, NkiTensor) else imm0
    values = apply_operator(first, flat(src), operand, False)
    result = _running(second, values, registers)
    registers.copy_(result[:, -1])
    dst.put(result)


def _running(operator: Operator, values: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """result[:, i] = values[:, i] operator result[:, i - 1], from `start`. May write to `values`."""
    values[:, 0] = operator.compute(values[:, 0], start)
    if operator is add:
        return values.cumsum(1)
    if operator is multiply:
        return values.cumprod(1)
    if operator is maximum:
        return values.cummax(1).values
    if operator is minimum:
        return values.cummin(1).values
    # Subtract: with alternating signs, value - previous becomes a running sum.
    signs = torch.ones(values.shape[1])
    signs[1::2] = -1.0
    return (values * signs).cumsum(1) * signs
