"""Operators as the Vector, Scalar and GpSimd ALUs apply them: float32 arithmetic, or bit patterns of integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dtypes import as_float32, int32, uint32
from ..enums import nc_version
from ..instruction import Call
from ..ops import Operator, abs_max, abs_min, as_operator, equal, greater, greater_equal, less, less_equal, not_equal
from ..tensor import NkiTensor

EXACT_INTEGERS = (int32, uint32)
# Comparisons as masks, without the detour over 0.0 and 1.0.
COMPARISONS: dict[Operator, Callable[..., torch.Tensor]] = {
    equal: torch.eq,
    not_equal: torch.ne,
    less: torch.lt,
    less_equal: torch.le,
    greater: torch.gt,
    greater_equal: torch.ge,
}


def alu_operator(call: Call, value: Any, *, inputs: int | None = 2) -> Operator:
    """The operator of an ALU instruction.

    Args:
        inputs: how many operands it must take; None for any.
    """
    operator = as_operator(value)
    if operator.kind not in ("arithmetic", "bitvec"):
        call.fail("operator", f"{operator!r} is not an ALU operator")
    if inputs is not None and operator.inputs != inputs:
        call.fail("operator", f"{operator!r} takes {operator.inputs} operand(s), expected {inputs}")
    if operator in (abs_max, abs_min):
        call.require_target(nc_version.gen4, repr(operator))
    return operator


def arithmetic_operator(call: Call, value: Any, *, inputs: int | None = 2) -> Operator:
    """The operator of an instruction that takes no bitvec operators."""
    operator = alu_operator(call, value, inputs=inputs)
    if operator.is_bitvec:
        call.fail("operator", f"{operator!r} is not an arithmetic operator")
    return operator


def check_scalar_operand(call: Call, operator: Operator, operand: Any, name: str) -> None:
    """Demand a number or a tensor for a binary operator, nothing (None or 0) for a unary one."""
    if operator.inputs == 1:
        if operand is not None and (isinstance(operand, NkiTensor) or operand != 0):
            call.fail("scalar-operand", f"{operator!r} is unary, {name} must be None or 0")
    elif not isinstance(operand, NkiTensor):
        if not isinstance(operand, (int, float)):
            call.fail("scalar-operand", f"{name} is {operand!r}, expected a number or a tensor")
        if operator.is_bitvec and not isinstance(operand, int):
            call.fail("scalar-operand", f"{name} is {operand!r}, {operator!r} takes an integer")


def check_bitvec(call: Call, operator: Operator, **tensors: Any) -> None:
    """Demand integer tensors for a bitvec operator."""
    if not operator.is_bitvec or not call.core.checking:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, NkiTensor) and not tensor.dtype.is_integer:
            call.fail("bitvec-integer", f"{operator!r} with {name} of dtype {tensor.dtype}")


def apply_operator(operator: Operator, values: torch.Tensor, operand: Any, reverse: bool) -> torch.Tensor:
    """operator(values, operand), the operand on the left when reversed and left out when the operator is unary."""
    if operator.inputs == 1:
        return operator.compute(values)
    return operator.compute(operand, values) if reverse else operator.compute(values, operand)


def unsigned(tensor: NkiTensor) -> torch.Tensor:
    """Bit patterns as non-negative int64."""
    width = 8 * tensor.dtype.itemsize
    return tensor.raw.to(torch.int64) & ((1 << width) - 1)


def put_bits(dst: NkiTensor, values: torch.Tensor) -> None:
    """Write int64 bit patterns, truncated to dst's width."""
    width = 8 * dst.dtype.itemsize
    values = values & ((1 << width) - 1)
    info = torch.iinfo(dst.format.torch)
    if info.min < 0:
        values = torch.where(values > info.max, values - (1 << width), values)
    dst.put_raw(values.to(dst.format.torch))


def exact(tensor: NkiTensor) -> torch.Tensor:
    """Values of an integer tensor as int64."""
    return tensor.raw.to(torch.int64)


def flat(tensor: NkiTensor) -> torch.Tensor:
    """Elements as float32, [partitions, elements per partition]."""
    values = tensor.f32()
    return values if values.ndim == 2 else values.reshape(values.shape[0], -1)


def flat_bits(tensor: NkiTensor) -> torch.Tensor:
    """Elements as integers of the same size, [partitions, elements per partition]."""
    return tensor.bits().reshape(tensor.shape[0], -1)


def constant(dst: NkiTensor, value: float) -> torch.Tensor:
    """A number as dst stores it, 0-dimensional; integers exactly when dst holds integers."""
    if dst.dtype.kind == "integer" and isinstance(value, int):
        return torch.tensor(value).to(dst.format.torch)
    return dst.format.encode(torch.tensor(as_float32(float(value))))


def column(value: Any, shape: tuple[int, ...], *, bits: bool = False) -> Any:
    """A per-partition operand, broadcast over the free dimensions of a tensor of `shape`; numbers as they are."""
    if not isinstance(value, NkiTensor):
        return as_float32(value) if type(value) is float else value
    values = unsigned(value) if bits else value.f32()
    return values if len(shape) == 2 and len(value.shape) == 2 else values.reshape(shape[0], *(1 for _ in shape[1:]))
