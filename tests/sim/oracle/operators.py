"""Operators of nki/api/nki.api.shared.rst, "Supported Math Operators for NKI ISA".

Arithmetic operators work in float64 where the engine works in float32; bitwise ones take int64 arrays and a width.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Bits = NDArray[np.int64]


def _truth(function: Callable[..., NDArray[np.bool_]]) -> Callable[..., Array]:
    return lambda x, y: function(x, y).astype(np.float64)


def _abs_max(x: Array, y: Array) -> Array:
    return np.where(np.abs(x) > np.abs(y), x, y)


def _abs_min(x: Array, y: Array) -> Array:
    return np.where(np.abs(x) < np.abs(y), x, y)


ARITHMETIC: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": _truth(np.equal),
    "not_equal": _truth(np.not_equal),
    "greater_equal": _truth(np.greater_equal),
    "greater": _truth(np.greater),
    "less_equal": _truth(np.less_equal),
    "less": _truth(np.less),
    "logical_and": _truth(np.logical_and),
    "logical_or": _truth(np.logical_or),
    "logical_xor": _truth(np.logical_xor),
    "power": np.power,
    "abs_max": _abs_max,
    "abs_min": _abs_min,
}
UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "square": np.square,
    "relu": lambda x: np.maximum(x, 0.0),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
}
BITWISE = ("invert", "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")
REDUCTIONS = ("add", "subtract", "multiply", "maximum", "minimum", "logical_and", "logical_or", "logical_xor")
BITWISE_REDUCTIONS = ("bitwise_and", "bitwise_or", "bitwise_xor")
# Where accumulator registers start: isa `tensor_scalar_reduce`, `tensor_scalar_cumulative`, `select_reduce`.
IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


def arithmetic(op: str, x: ArrayLike, y: ArrayLike | None = None, reverse: bool = False) -> Array:
    """`x op y`, or `y op x` when reversed; unary operators ignore y."""
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        if op in UNARY:
            return UNARY[op](x)
        y = np.asarray(y, np.float64)
        return ARITHMETIC[op](y, x) if reverse else ARITHMETIC[op](x, y)


def bitwise(op: str, x: ArrayLike, y: ArrayLike | None, dtype: str, reverse: bool = False) -> Bits:
    """Bitwise `x op y` on patterns of an integer dtype; shifts are logical and shift in zeros."""
    width = int(dtype.removeprefix("u").removeprefix("int"))
    mask = 2**width - 1
    a = np.asarray(x, np.int64) & mask
    b = np.asarray(0 if y is None else y, np.int64) & mask
    if reverse:
        a, b = b, a
    if op == "invert":
        result = ~a
    elif op == "left_shift":
        result = np.where(b < width, a << np.minimum(b, width - 1), 0)
    elif op == "right_shift":
        result = np.where(b < width, a >> np.minimum(b, width - 1), 0)
    else:
        result = {"bitwise_and": a & b, "bitwise_or": a | b, "bitwise_xor": a ^ b}[op]
    return wrap_integer(result, dtype)


def wrap_integer(values: ArrayLike, dtype: str) -> Bits:
    """Two's-complement wrap of integers to `dtype`."""
    width = int(dtype.removeprefix("u").removeprefix("int"))
    result = np.asarray(values, np.int64) & (2**width - 1)
    return result if dtype.startswith("u") else np.where(result >= 2 ** (width - 1), result - 2**width, result)


def reduce(op: str, x: ArrayLike, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
    """Arithmetic reduction in order of increasing index; subtract is the first element minus the rest."""
    x = np.asarray(x, np.float64)
    if op == "subtract":
        axes = (axis,) if isinstance(axis, int) else axis
        first = x[tuple(slice(0, 1) if dim in {a % x.ndim for a in axes} else slice(None) for dim in range(x.ndim))]
        result = 2 * first - x.sum(axes, keepdims=True)
        return result if keepdims else result.squeeze(axes)
    functions: dict[str, Callable[..., Array]] = {
        "add": np.sum,
        "multiply": np.prod,
        "maximum": np.max,
        "minimum": np.min,
        "logical_and": lambda v, a, keepdims: np.all(v != 0, a, keepdims=keepdims).astype(np.float64),
        "logical_or": lambda v, a, keepdims: np.any(v != 0, a, keepdims=keepdims).astype(np.float64),
        "logical_xor": lambda v, a, keepdims: (np.sum(v != 0, a, keepdims=keepdims) % 2).astype(np.float64),
    }
    return functions[op](x, axis, keepdims=keepdims)
