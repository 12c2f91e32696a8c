"""Scalar engine: nki.isa `activation`, `activation_reduce`, `activate2`; nki.api.shared.rst, activation functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .operators import ARITHMETIC, arithmetic

Array = NDArray[np.float64]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    # exp of a non-positive number only, so that it cannot overflow.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _gelu_dx(x: Array) -> Array:
    return 0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_sigmoid_dx(x: Array) -> Array:
    s = _sigmoid(1.702 * x)
    return s + 1.702 * x * s * (1 - s)


def _silu_dx(x: Array) -> Array:
    s = _sigmoid(x)
    return s + x * s * (1 - s)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "gelu_dx": _gelu_dx,
    "gelu_apprx_tanh": _gelu_tanh,
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "gelu_apprx_sigmoid_dx": _gelu_sigmoid_dx,
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
    "tanh": np.tanh,
    "softplus": _softplus,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "erf": _erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "arctan": np.arctan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sign": np.sign,
    "abs": np.abs,
}
# (smallest, largest) magnitude for log, roots and reciprocal; (low, high) for sin and arctan.
VALID_RANGE = {
    "log": (2.0**-64, 2.0**64),
    "sin": (-math.pi, math.pi),
    "arctan": (-math.pi / 2, math.pi / 2),
    "sqrt": (2.0**-116, 2.0**118),
    "rsqrt": (2.0**-87, 2.0**97),
    "reciprocal": (2.0**-42, 2.0**42),
}


def in_valid_range(op: str, x: ArrayLike) -> NDArray[np.bool_]:
    """Where the table promises a valid result; the reciprocal's range holds for both signs."""
    x = np.asarray(x, np.float64)
    if op not in VALID_RANGE:
        return np.ones(x.shape, np.bool_)
    low, high = VALID_RANGE[op]
    return (low <= (x := np.abs(x) if op == "reciprocal" else x)) & (x <= high)


def apply(op: str, x: ArrayLike, slope: ArrayLike = 0.0) -> Array:
    """The activation function; `slope` is the factor of negative inputs of prelu."""
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        if op == "prelu":
            return np.where(x >= 0, x, x * np.asarray(slope, np.float64))
        return ACTIVATIONS[op](x)


def activation(
    op: str,
    data: ArrayLike,
    bias: ArrayLike = 0.0,
    scale: ArrayLike = 1.0,
    reduce_cmd: str = "idle",
    registers: ArrayLike = 0.0,
) -> tuple[Array, Array]:
    """op(data * scale + bias) of [P, ...], and the [P, 1] accumulator registers after `reduce_cmd`.

    Scale and bias are scalars or [P, 1]. Commands: idle, reset, reduce, reset_reduce; the reduction is a sum.
    """
    x = np.asarray(data, np.float64)
    flat = x.reshape(x.shape[0], -1)
    result = apply(op, flat * np.asarray(scale, np.float64) + np.asarray(bias, np.float64))
    return result.reshape(x.shape), accumulate("add", result, reduce_cmd, registers)


def activate2(
    op: str,
    data: ArrayLike,
    imm0: ArrayLike,
    imm1: ArrayLike,
    op0: str,
    op1: str,
    relu_param: ArrayLike = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: str = "add",
    reduce_cmd: str = "idle",
    registers: ArrayLike = 0.0,
) -> tuple[Array, Array]:
    """op((data op0 imm0) op1 imm1) and the registers; an operator "bypass" is skipped."""
    x = np.asarray(data, np.float64)
    value = x.reshape(x.shape[0], -1)
    for operator, immediate, reverse in ((op0, imm0, reverse0), (op1, imm1, reverse1)):
        if operator != "bypass":
            value = arithmetic(operator, value, immediate, reverse)
    result = apply(op, value, relu_param)
    return result.reshape(x.shape), accumulate(reduce_op, result, reduce_cmd, registers)


# Identities of the Scalar engine's reductions; a magnitude is never below 0 or above infinity.
_START = {"add": 0.0, "maximum": -np.inf, "minimum": np.inf, "abs_max": 0.0, "abs_min": np.inf}


def accumulate(op: str, result: Array, reduce_cmd: str, registers: ArrayLike) -> Array:
    """[P, 1] registers after an instruction whose activated data is `result` [P, N]."""
    start = np.broadcast_to(np.asarray(registers, np.float64), (result.shape[0], 1)).copy()
    if reduce_cmd in ("reset", "reset_reduce"):
        start[:] = _START[op]
    if reduce_cmd in ("reduce", "reset_reduce"):
        for column in range(result.shape[1]):
            start = ARITHMETIC[op](start, result[:, column : column + 1])
    return start
