"""Element-wise and reducing instructions of the Vector Engine, some of which other engines run too.

Source: nki/api/nki/isa/__init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import FLOAT32, as_float32
from ..enums import MemoryRegion, nc_version
from ..enums import engine as Engine
from ..instruction import Call, instruction
from ..operand_checks import require_float32
from ..ops import Operator, abs_max, abs_min, add, as_operator, multiply, power, rsqrt
from ..tensor import GatheredTensor, NkiTensor
from .alu import (
    EXACT_INTEGERS,
    alu_operator,
    apply_operator,
    arithmetic_operator,
    check_bitvec,
    check_scalar_operand,
    column,
    exact,
    put_bits,
    unsigned,
)
from .dma import copy

_PSUM = MemoryRegion.psum


def _vector_unless_asked(*bound: Any) -> Engine:
    engine: Engine = bound[-2]
    return Engine.vector if engine is Engine.unknown else engine


@instruction(
    engine=_vector_unless_asked,
    engines=(Engine.vector, Engine.scalar, Engine.gpsimd),
    reads=("src",),
    writes=("dst",),
    elementwise=("src", "dst"),
    indirect=("dst", "src"),
)
def tensor_copy(
    call: Call, dst: NkiTensor, src: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """dst = src within SBUF and PSUM; bit for bit between equal dtypes, else through float32."""
    if call.engine is Engine.scalar:
        call.require_target(nc_version.gen3, "tensor_copy on the Scalar Engine")
    elif call.engine is Engine.gpsimd and (isinstance(src, GatheredTensor) or isinstance(dst, GatheredTensor)):
        call.require(False, "engine-choice", "tensor indirection runs on the Vector or the Scalar Engine")
    if dst.dtype != src.dtype and "packed" in (dst.dtype.kind, src.dtype.kind):
        call.fail("matching-dtype", f"src is {src.dtype}, dst {dst.dtype}; packed dtypes are not cast")
    if call.core.computes:
        copy(dst, src)


@instruction(engine=_vector_unless_asked, engines=(Engine.vector, Engine.gpsimd), writes=("dst",))
def memset(call: Call, dst: NkiTensor, value: float, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """Fill dst with the constant `value`, an integer for integer dtypes; packed x4 dtypes take 0 only."""
    kind = dst.dtype.kind
    if kind == "packed":
        call.require(value == 0, "memset-value", f"value is {value} for {dst.dtype}, expected 0")
    elif dst.dtype.is_integer:
        call.require(isinstance(value, int), "memset-value", f"value is {value!r} for {dst.dtype}, expected an integer")
        if kind == "integer":
            low, high = torch.iinfo(dst.format.torch).min, torch.iinfo(dst.format.torch).max
            call.require(low <= value <= high, "memset-value", f"value is {value} for {dst.dtype}, {low} to {high}")
    if not call.core.computes:
        return
    if kind == "packed" or (kind == "integer" and dst.dtype.itemsize == 4):
        dst.put_raw(torch.tensor(int(value)).to(dst.format.torch).expand(dst.shape))
    elif dst.format is FLOAT32 and type(dst) is NkiTensor:
        dst.target().fill_(as_float32(value))
    else:
        dst.put(torch.tensor(as_float32(float(value))).expand(dst.shape))


def _tensor_tensor_engine(
    dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Any, engine: Engine, name: str | None
) -> Engine:
    if op is power:
        return Engine.gpsimd if engine is Engine.unknown else engine
    if engine is not Engine.unknown:
        return engine
    tensors = (dst, data1, data2)
    exact_integers = all(t.dtype in EXACT_INTEGERS for t in tensors)
    if exact_integers and not any(t.buffer is _PSUM for t in tensors) and not as_operator(op).is_bitvec:
        return Engine.gpsimd
    return Engine.vector


@instruction(
    engine=_tensor_tensor_engine,
    engines=(Engine.vector, Engine.gpsimd),
    reads=("data1", "data2"),
    writes=("dst",),
    elementwise=("data1", "data2", "dst"),
    not_both_psum=("data1", "data2"),
    indirect=("dst", "data1"),
)
def tensor_tensor(
    call: Call,
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = data1 op data2, element by element.

    Arithmetic is in float32, but exact between int32/uint32 tensors on GpSimd; bitvec operators take integers.
    """
    operator = alu_operator(call, op)
    check_bitvec(call, operator, dst=dst, data1=data1, data2=data2)
    if operator is power:
        call.require(call.engine is Engine.gpsimd, "engine-choice", "nl.power runs on the GpSimd Engine")
    if not call.core.computes:
        return
    if operator.is_bitvec:
        put_bits(dst, operator.compute(unsigned(data1), unsigned(data2).reshape(data1.shape)))
    elif call.engine is Engine.gpsimd and all(t.dtype in EXACT_INTEGERS for t in (dst, data1, data2)):
        put_bits(dst, operator.compute(exact(data1), exact(data2).reshape(data1.shape)).to(torch.int64))
    else:
        left, right = data1.f32(), data2.f32()
        if left.shape != right.shape:
            right = right.reshape(left.shape)
        call.emit(operator.compute, dst, left, right)


def _tensor_scalar_engine(*bound: Any) -> Engine:
    engine: Engine = bound[-2]
    if engine is not Engine.unknown:
        return engine
    return Engine.gpsimd if bound[2] is rsqrt or bound[5] is rsqrt else Engine.vector


_SCALAR_ENGINE_TRN2 = ((multiply, add), (multiply, None), (add, None))


@instruction(
    engine=_tensor_scalar_engine,
    engines=(Engine.vector, Engine.scalar, Engine.gpsimd),
    reads=("data", "operand0", "operand1"),
    writes=("dst",),
    elementwise=("data", "dst"),
    vectors=("operand0", "operand1"),
    indirect=("dst", "data"),
)
def tensor_scalar(
    call: Call,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: float | NkiTensor | None,
    reverse0: bool = False,
    op1: Any = None,
    operand1: float | NkiTensor | None = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1, the operands constants or [P, 1] tensors.

    Both operators are arithmetic (float32; tensor operands float32) or both bitvec (integers, Vector Engine).
    `reverse0`, `reverse1` put the operand on the left. Unary operators take None or 0 as operand.
    """
    first = alu_operator(call, op0, inputs=None)
    second = None if op1 is None else alu_operator(call, op1, inputs=None)
    check_scalar_operand(call, first, operand0, "operand0")
    if second is None:
        call.require(operand1 is None, "scalar-operand", "operand1 without op1")
    else:
        check_scalar_operand(call, second, operand1, "operand1")
        if second.is_bitvec != first.is_bitvec:
            call.fail("operator-kind", f"{first!r} and {second!r} are not both bitvec or both arithmetic")
    if call.core.checking:
        _check_tensor_scalar(call, first, second, dst, data, operand0, operand1)
    if not call.core.computes:
        return
    if first.is_bitvec:
        values = _apply_bits(first, unsigned(data), column(operand0, data.shape, bits=True), reverse0, data)
        if second is not None:
            values = _apply_bits(second, values, column(operand1, data.shape, bits=True), reverse1, data)
        put_bits(dst, values)
        return
    values = data.f32()
    if second is None:
        _emit(call, first, dst, values, column(operand0, data.shape), reverse0)
    else:
        middle = apply_operator(first, values, column(operand0, data.shape), reverse0)
        _emit(call, second, dst, middle, column(operand1, data.shape), reverse1)


def _check_tensor_scalar(
    call: Call, first: Operator, second: Operator | None, dst: NkiTensor, data: NkiTensor, operand0: Any, operand1: Any
) -> None:
    if first.is_bitvec:
        check_bitvec(call, first, dst=dst, data=data, operand0=operand0, operand1=operand1)
        call.require(call.engine is Engine.vector, "engine-choice", f"{first!r} runs on the Vector Engine")
    else:
        require_float32(call, "operand0", operand0)
        require_float32(call, "operand1", operand1)
    if call.engine is Engine.scalar and not call.core.target.at_least(nc_version.gen4):
        call.require(
            (first, second) in _SCALAR_ENGINE_TRN2,
            "engine-choice",
            f"the Scalar Engine of {call.core.target.name} does multiply-add, multiply, add, not {first!r} {second!r}",
        )
    if call.engine is Engine.gpsimd:
        call.require(rsqrt in (first, second), "engine-choice", "tensor_scalar runs on GpSimd only for nl.rsqrt")


def _emit(call: Call, operator: Operator, dst: NkiTensor, values: torch.Tensor, operand: Any, reverse: bool) -> None:
    if operator.inputs == 1:
        call.emit(operator.compute, dst, values)
    elif reverse:
        dst.put(apply_operator(operator, values, operand, True))
    else:
        call.emit(operator.compute, dst, values, operand)


def _apply_bits(operator: Operator, values: torch.Tensor, operand: Any, reverse: bool, data: NkiTensor) -> torch.Tensor:
    mask = (1 << 8 * data.dtype.itemsize) - 1
    if operator.inputs == 1:
        return operator.compute(values) & mask
    operand = operand & mask if isinstance(operand, int) else operand
    operand = torch.as_tensor(operand, dtype=torch.int64)
    return (operator.compute(operand, values) if reverse else operator.compute(values, operand)) & mask


@instruction(
    engine=Engine.vector,
    reads=("data", "operand0", "operand1"),
    writes=("dst",),
    elementwise=("data", "operand1", "dst"),
    vectors=("operand0",),
    not_both_psum=("data", "operand1"),
)
def scalar_tensor_tensor(
    call: Call,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: float | NkiTensor | None,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1 in float32, operand0 a constant or [P, 1] and operand1 like data.

    Both operators are arithmetic. `reverse0`, `reverse1` put the operand on the left.
    """
    first, second = arithmetic_operator(call, op0, inputs=None), arithmetic_operator(call, op1)
    check_scalar_operand(call, first, operand0, "operand0")
    if not call.core.computes:
        return
    middle = apply_operator(first, data.f32(), column(operand0, data.shape), reverse0)
    right = operand1.f32()
    if right.shape != middle.shape:
        right = right.reshape(middle.shape)
    call.emit(second.compute, dst, *((right, middle) if reverse1 else (middle, right)))


@instruction(engine=Engine.vector, reads=("data",), writes=("dst",), elementwise=("data", "dst"))
def reciprocal(call: Call, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst = 1 / data in float32."""
    if call.core.computes:
        call.emit(torch.reciprocal, dst, data.f32())


@instruction(engine=Engine.vector, reads=("data",), writes=("dst",), indirect=("dst", "data"))
def tensor_reduce(
    call: Call,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: int | Sequence[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """dst = data reduced with `op` over `axis`, the last free dimensions; in float32, negated on request.

    Bitvec operators reduce integer bit patterns.
    """
    operator = as_operator(op)
    if operator.reduce is None or operator.kind not in ("arithmetic", "bitvec") or operator in (abs_max, abs_min):
        call.fail("operator", f"{operator!r} cannot reduce")
    check_bitvec(call, operator, dst=dst, data=data)
    axes = reduce_axes(call, data, axis)
    kept = data.shape[: len(data.shape) - len(axes)]
    if dst.shape[0] != data.shape[0]:
        call.fail("same-partitions", f"dst has {dst.shape[0]} partitions, data {data.shape[0]}")
    if dst.size != math.prod(kept):
        call.fail(
            "same-elements", f"dst is {list(dst.shape)}, expected {list(kept)} with the reduced axes gone or of size 1"
        )
    if operator.is_bitvec:
        call.require(not negate, "operator", f"negate needs an arithmetic operator, got {operator!r}")
    if not call.core.computes:
        return
    shape = (*kept, -1)
    if operator.is_bitvec:
        put_bits(dst, operator.reduce(unsigned(data).reshape(shape)))
        return
    values = data.f32()
    result = operator.reduce(values if len(axes) == 1 else values.reshape(shape))
    dst.put(result.neg() if negate else result)


def reduce_axes(call: Call, data: NkiTensor, axis: int | Sequence[int]) -> list[int]:
    """The reduced dimensions, checked to be the last ones and not the partition dimension."""
    ndim = len(data.shape)
    given = [axis] if isinstance(axis, int) else axis
    axes = sorted(a + ndim if a < 0 else a for a in given)
    if not axes or axes != list(range(ndim - len(axes), ndim)) or axes[0] == 0:
        call.fail("reduce-axis", f"axis {axis} of data {list(data.shape)}")
    return axes
