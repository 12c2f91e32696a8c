"""Functions on tiles, by way of instructions. Source: nki/api/nki/language/__init__.py.

Each returns a new SBUF tile whose dtype is that of the first tile unless `dtype` is given.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core import current_core, fail
from ..dtypes import float32
from ..enums import MemoryRegion, engine
from ..integers import integers
from ..isa import vector
from ..isa.scalar import activation
from ..isa.vector import tensor_reduce, tensor_scalar, tensor_tensor
from ..ops import (
    Operator,
    add,
    copy,
    exp,
    logical_and,
    maximum,
    minimum,
    multiply,
    reciprocal,
    rsqrt,
    sin,
    square,
    subtract,
)
from ..tensor import NkiTensor, require_tensor
from .composite import composite
from .creation import ndarray
from .data import broadcast_to, copy_tile

Tile = NkiTensor
Axis = int | Sequence[int]


def unary(operator: Operator, x: Tile, dtype: Any = None) -> Tile:
    """operator(x) on a tile."""
    _require_tile(operator, x)
    if operator is copy:
        return copy_tile(x, dtype)
    result = ndarray(x.shape, dtype or x.dtype)
    if operator is sin:
        composite(dst=result, inputs=[x], function=torch.sin)
    elif operator.kind == "language":
        composite(dst=result, inputs=[x], function=operator.compute)
    elif operator.kind == "activation":
        activation(dst=result, op=operator, data=x)
    elif operator is rsqrt:
        tensor_scalar(dst=result, data=x, op0=rsqrt, operand0=0.0, engine=engine.gpsimd)
    elif operator is reciprocal:
        vector.reciprocal(dst=result, data=x)
    else:
        tensor_scalar(dst=result, data=x, op0=operator, operand0=None)
    return result


def binary(operator: Operator, x: Any, y: Any, dtype: Any = None) -> Tile:
    """operator(x, y) on two tiles, or a tile and a number."""
    _require_tile(operator, x, y)
    first = x if isinstance(x, NkiTensor) else y
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        x, y = _together(x, y)
        first = x
        result = ndarray(x.shape, dtype or x.dtype)
        if operator.kind == "language":
            composite(dst=result, inputs=[x, y], function=operator.compute)
        else:
            tensor_tensor(dst=result, data1=x, data2=y, op=operator)
        return result
    result = ndarray(first.shape, dtype or first.dtype)
    reverse = first is y
    number = x if reverse else y
    if operator.kind == "language":
        _require_number(number, "y" if not reverse else "x")
        function = operator.compute
        composite(
            dst=result, inputs=[first], function=lambda v: function(number, v) if reverse else function(v, number)
        )
    else:
        tensor_scalar(dst=result, data=first, op0=operator, operand0=number, reverse0=reverse)
    return result


def _require_tile(operator: Operator, *operands: Any) -> None:
    if not any(isinstance(value, NkiTensor) for value in operands):
        fail("operator", f"{operator!r} takes {operator.inputs} operand(s), at least one of them a tile")


def _require_number(value: Any, name: str) -> None:
    if not isinstance(value, (NkiTensor, int, float, np.integer, np.floating)):
        fail("scalar-operand", f"{name} is {value!r}, expected a number or a tile")


def _together(x: Tile, y: Tile) -> tuple[Tile, Tile]:
    """Broadcast two tiles to one shape: free dimensions as views, the partition dimension with a copy."""
    if (x.shape != y.shape and x.size // x.shape[0] != y.size // y.shape[0]) or x.shape[0] != y.shape[0]:
        if len(x.shape) != len(y.shape):
            fail("same-elements", f"tiles of shape {list(x.shape)} and {list(y.shape)} cannot be broadcast together")
        shape = [builtins.max(a, b) for a, b in zip(x.shape, y.shape, strict=True)]
        x, y = _spread(x, shape), _spread(y, shape)
    if x.buffer is MemoryRegion.psum and y.buffer is MemoryRegion.psum:
        y = copy_tile(y)
    return x, y


def _spread(x: Tile, shape: Sequence[int]) -> Tile:
    for dim in range(1, len(shape)):
        if x.shape[dim] != shape[dim]:
            x = x.broadcast(dim, shape[dim])
    return broadcast_to(x, shape) if x.shape[0] != shape[0] else x


# Reductions over the last free dimensions.


def _axes(x: Tile, axis: Axis) -> list[int]:
    require_tensor(x, "x")
    ndim = len(x.shape)
    axes = sorted(a + ndim if a < 0 else a for a in integers(axis if isinstance(axis, Sequence) else (axis,), "axis"))
    if not axes or axes != list(range(ndim - len(axes), ndim)) or axes[0] == 0:
        fail("reduce-axis", f"axis {axis} of x {list(x.shape)}")
    return axes


def _reduced_shape(x: Tile, axis: Axis, keepdims: bool) -> tuple[int, ...]:
    axes = _axes(x, axis)
    if keepdims:
        return tuple(1 if d in axes else size for d, size in enumerate(x.shape))
    kept = tuple(size for d, size in enumerate(x.shape) if d not in axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _reduce(operator: Operator, x: Tile, axis: Axis, dtype: Any, keepdims: bool) -> Tile:
    result = ndarray(_reduced_shape(x, axis, keepdims), dtype or x.dtype)
    tensor_reduce(dst=result, op=operator, data=x, axis=_axes(x, axis))
    return result


class Reduction:
    """A reduction to call on a tile; instructions take it for the operator it reduces with (nl.max for nl.maximum)."""

    def __init__(self, name: str, operator: Operator) -> None:
        self.__name__ = name
        self.operator = operator

    def __call__(self, x: Tile, axis: Axis, dtype: Any = None, keepdims: bool = False) -> Tile:
        """Reduce over `axis`, the last free dimension(s)."""
        return _reduce(self.operator, x, axis, dtype, keepdims)

    def __repr__(self) -> str:
        return f"nl.{self.__name__}"


sum = Reduction("sum", add)
max = Reduction("max", maximum)
min = Reduction("min", minimum)
prod = Reduction("prod", multiply)


def all(x: Tile, axis: Axis, dtype: Any = None) -> Tile:
    """Logical AND over `axis`."""
    return _reduce(logical_and, x, axis, dtype, False)


def mean(x: Tile, axis: Axis, dtype: Any = None, keepdims: bool = False) -> Tile:
    """Mean over `axis`, accumulated in float32."""
    count = math.prod(x.shape[d] for d in _axes(x, axis))
    total = _reduce(add, x, axis, float32, keepdims)
    result = ndarray(total.shape, dtype or x.dtype)
    tensor_scalar(dst=result, data=total, op0=multiply, operand0=1.0 / count)
    return result


def var(x: Tile, axis: Axis, dtype: Any = None, keepdims: bool = False) -> Tile:
    """Population variance over `axis`; the reduced dimensions always stay, with size 1."""
    axes = _axes(x, axis)
    result = ndarray(_reduced_shape(x, axis, True), dtype or x.dtype)
    composite(dst=result, inputs=[x], function=lambda values: values.var(axes, correction=0))
    return result


# Compounds.


def softmax(x: Tile, axis: Axis = -1, dtype: Any = None) -> Tile:
    """exp(x - max) / sum over `axis`, in float32."""
    top = _reduce(maximum, x, axis, float32, True)
    shifted = binary(subtract, x, top, dtype=float32)
    powers = unary(exp, shifted, dtype=float32)
    total = _reduce(add, powers, axis, float32, True)
    return binary(multiply, powers, unary(reciprocal, total), dtype=dtype or x.dtype)


def rms_norm(
    x: Tile, w: Tile, axis: Axis, n: int, epsilon: float = 1e-06, dtype: Any = None, compute_dtype: Any = None
) -> Tile:
    """x / sqrt(sum(x * x over axis) / n + epsilon) * w."""
    kind = compute_dtype or float32
    total = _reduce(add, unary(square, x, dtype=kind), axis, kind, True)
    scale = ndarray(total.shape, kind)
    tensor_scalar(dst=scale, data=total, op0=multiply, operand0=1.0 / n, op1=add, operand1=epsilon)
    normed = binary(multiply, x, unary(rsqrt, scale), dtype=kind)
    return binary(multiply, normed, w, dtype=dtype or x.dtype)


def where(condition: Tile, x: Any, y: Any, dtype: Any = None) -> Tile:
    """Elements of x where condition is not 0, else of y."""
    require_tensor(condition, "condition")
    _require_number(x, "x")
    _require_number(y, "y")
    tiles = [value for value in (x, y) if isinstance(value, NkiTensor)]
    result = ndarray(condition.shape, dtype or (tiles[0] if tiles else condition).dtype)

    def pick(mask: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        remaining = list(values)
        left, right = (
            remaining.pop(0) if isinstance(value, NkiTensor) else torch.tensor(float(value)) for value in (x, y)
        )
        return torch.where(mask != 0, left, right)

    composite(dst=result, inputs=[condition, *tiles], function=pick)
    return result


def dropout(x: Tile, rate: float | Tile, dtype: Any = None) -> Tile:
    """Elements of x, each replaced by 0 with probability `rate`, a number or a [P, 1] tile."""
    require_tensor(x, "x")
    _require_number(rate, "rate")
    result = ndarray(x.shape, dtype or x.dtype)
    generator = current_core().generator

    def drop(values: torch.Tensor, *rates: torch.Tensor) -> torch.Tensor:
        threshold: Any = rates[0].reshape(-1, *(1 for _ in values.shape[1:])) if rates else rate
        return torch.where(torch.rand(values.shape, generator=generator) >= threshold, values, 0.0)

    composite(dst=result, inputs=[x, rate] if isinstance(rate, NkiTensor) else [x], function=drop)
    return result
