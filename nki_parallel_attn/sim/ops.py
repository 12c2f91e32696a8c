"""Operators: nl.add and its like are functions to call on tiles and, at the same time, values for `op=` parameters.

Source: nki/api/nki.api.shared.rst (operators and activation functions, with their valid input ranges). All arithmetic
is in float32; bitvec operators work on bit patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .core import fail

F = torch.nn.functional
PI = math.pi


@dataclass(eq=False)
class Operator:
    """An operator or activation function of nki.language.

    Attributes:
        compute: float32 in, float32 out; takes `out=`. Integers in and out for bitvec operators.
        inputs: 1 or 2.
        kind: "arithmetic", "bitvec", or "activation" for functions that only activation instructions take.
        activation: whether the Scalar Engine has it as an activation function.
        reduce: reduction over the last dimension (float32, or integers for bitvec), or None when it cannot reduce.
        identity: neutral element of the reduction.
        valid: range of inputs for which the Scalar Engine gives valid results; magnitudes for reciprocal.
    """

    name: str
    compute: Callable[..., torch.Tensor]
    inputs: int = 2
    kind: str = "arithmetic"
    activation: bool = False
    reduce: Callable[..., torch.Tensor] | None = None
    identity: float = 0.0
    valid: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self.__name__ = self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply to tiles, as nki.language documents: (x, dtype=None) or (x, y, dtype=None); see language/math.py."""
        from .language.math import binary, unary

        return (unary if self.inputs == 1 else binary)(self, *args, **kwargs)

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    @property
    def is_bitvec(self) -> bool:
        """Whether it works on bit patterns."""
        return self.kind == "bitvec"


def _plain(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give a function an `out=` parameter."""

    def with_out(*args: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        result = function(*args)
        return result if out is None else out.copy_(result)

    return with_out


def _compare(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compare(a: Any, b: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None:
            return function(a, b, out=out)
        return function(a, b).to(torch.float32)

    return compare


def _logical(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return _plain(lambda a, b: function(torch.as_tensor(a) != 0, torch.as_tensor(b) != 0).to(torch.float32))


def _tensors(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For torch functions that refuse Python numbers as operands."""

    def call(a: Any, b: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        a = a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=b.dtype)
        b = b if isinstance(b, torch.Tensor) else torch.tensor(b, dtype=a.dtype)
        return function(a, b, out=out)

    return call


def _either(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For torch functions that refuse a Python number as the first operand."""

    def call(a: Any, b: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        a = a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=torch.float32)
        return function(a, b, out=out)

    return call


def _abs_pick(larger: bool) -> Callable[..., torch.Tensor]:
    def pick(a: Any, b: Any) -> torch.Tensor:
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return torch.where(a.abs() > b.abs() if larger else a.abs() < b.abs(), a, b)

    return _plain(pick)


def _shift(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Shifts of int64 bit patterns of at most 32 bits; by 64 and more they would be undefined."""
    return lambda a, b: function(a, torch.as_tensor(b).clamp(max=63))


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(-1)


def _tree(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Reduce the last dimension with an associative function, neighbours first."""

    def tree(values: torch.Tensor) -> torch.Tensor:
        while (n := values.shape[-1]) > 1:
            even = n // 2 * 2
            paired = function(values[..., 0:even:2], values[..., 1:even:2])
            values = torch.cat((paired, values[..., even:]), -1) if n % 2 else paired
        return values[..., 0]

    return tree


def _erf_dx(x: torch.Tensor) -> torch.Tensor:
    return 2.0 / math.sqrt(PI) * torch.exp(-x * x)


def _gelu_dx(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * PI)


def _gelu_sigmoid_dx(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(1.702 * x)
    return s + 1.702 * x * s * (1 - s)


def _silu_dx(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _scalar_engine_sin(x: torch.Tensor) -> torch.Tensor:
    """sin within [-pi, pi]; outside, the engine extends the cubic of the nearest end (sin(9) is about 27.65)."""
    beyond = x - x.sign() * PI
    return torch.where(x.abs() <= PI, torch.sin(x), beyond**3 / 6 - beyond)


# Binary arithmetic.
add = Operator("add", torch.add, reduce=_sum)
subtract = Operator("subtract", torch.sub, reduce=lambda v: v[..., 0] - v[..., 1:].sum(-1))
multiply = Operator("multiply", torch.mul, reduce=lambda v: v.prod(-1), identity=1.0)
maximum = Operator("maximum", _tensors(torch.maximum), reduce=lambda v: v.amax(-1), identity=-math.inf)
minimum = Operator("minimum", _tensors(torch.minimum), reduce=lambda v: v.amin(-1), identity=math.inf)
abs_max = Operator("abs_max", _abs_pick(True), reduce=_tree(_abs_pick(True)))
abs_min = Operator("abs_min", _abs_pick(False), reduce=_tree(_abs_pick(False)), identity=math.inf)
power = Operator("power", _either(torch.pow))
equal = Operator("equal", _compare(_either(torch.eq)))
not_equal = Operator("not_equal", _compare(_either(torch.ne)))
less = Operator("less", _compare(_either(torch.lt)))
less_equal = Operator("less_equal", _compare(_either(torch.le)))
greater = Operator("greater", _compare(_either(torch.gt)))
greater_equal = Operator("greater_equal", _compare(_either(torch.ge)))
logical_and = Operator(
    "logical_and", _logical(torch.logical_and), reduce=lambda v: (v != 0).all(-1).float(), identity=1.0
)
logical_or = Operator("logical_or", _logical(torch.logical_or), reduce=lambda v: (v != 0).any(-1).float())
logical_xor = Operator("logical_xor", _logical(torch.logical_xor), reduce=lambda v: ((v != 0).sum(-1) % 2).float())

# Bitvec: on bit patterns held in int64, of `width` bits.
bitwise_and = Operator("bitwise_and", torch.bitwise_and, kind="bitvec", reduce=_tree(torch.bitwise_and), identity=-1)
bitwise_or = Operator("bitwise_or", torch.bitwise_or, kind="bitvec", reduce=_tree(torch.bitwise_or))
bitwise_xor = Operator("bitwise_xor", torch.bitwise_xor, kind="bitvec", reduce=_tree(torch.bitwise_xor))
left_shift = Operator("left_shift", _shift(torch.bitwise_left_shift), kind="bitvec")
right_shift = Operator("right_shift", _shift(torch.bitwise_right_shift), kind="bitvec")
invert = Operator("invert", torch.bitwise_not, inputs=1, kind="bitvec")

# Unary arithmetic, which activations have too.
abs = Operator("abs", torch.abs, 1, activation=True)
square = Operator("square", torch.square, 1, activation=True)
relu = Operator("relu", _plain(torch.relu), 1, activation=True)
rsqrt = Operator("rsqrt", torch.rsqrt, 1, activation=True, valid=(2.0**-87, 2.0**97))
reciprocal = Operator("reciprocal", torch.reciprocal, 1, activation=True, valid=(2.0**-42, 2.0**42))


def _activation(name: str, compute: Callable[..., torch.Tensor], valid: tuple[float, float] | None = None) -> Operator:
    return Operator(name, compute, 1, "activation", True, valid=valid)


copy = _activation("copy", _plain(lambda x: x))
sigmoid = _activation("sigmoid", torch.sigmoid)
gelu = _activation("gelu", _plain(F.gelu))
gelu_dx = _activation("gelu_dx", _plain(_gelu_dx))
gelu_apprx_tanh = _activation("gelu_apprx_tanh", _plain(lambda x: F.gelu(x, approximate="tanh")))
gelu_apprx_sigmoid = _activation("gelu_apprx_sigmoid", _plain(lambda x: x * torch.sigmoid(1.702 * x)))
gelu_apprx_sigmoid_dx = _activation("gelu_apprx_sigmoid_dx", _plain(_gelu_sigmoid_dx))
silu = _activation("silu", _plain(F.silu))
silu_dx = _activation("silu_dx", _plain(_silu_dx))
tanh = _activation("tanh", torch.tanh)
softplus = _activation("softplus", _plain(F.softplus))
mish = _activation("mish", _plain(F.mish))
erf = _activation("erf", torch.erf)
erf_dx = _activation("erf_dx", _plain(_erf_dx))
exp = _activation("exp", torch.exp)
log = _activation("log", torch.log, (2.0**-64, 2.0**64))
sin = _activation("sin", _plain(_scalar_engine_sin), (-PI, PI))
arctan = _activation("arctan", torch.arctan, (-PI / 2, PI / 2))
sqrt = _activation("sqrt", torch.sqrt, (2.0**-116, 2.0**118))
sign = _activation("sign", torch.sign)
prelu = _activation("prelu", _plain(lambda x, slope=0.0: torch.where(x >= 0, x, x * slope)))

# Functions of nki.language that no single instruction computes.
divide = Operator("divide", _either(torch.div), kind="language")
fmod = Operator("fmod", _tensors(torch.fmod), kind="language")
mod = Operator("mod", _tensors(torch.remainder), kind="language")
logical_not = Operator("logical_not", _plain(lambda x: (x == 0).to(torch.float32)), 1, "language")
cos = Operator("cos", torch.cos, 1, "language")
tan = Operator("tan", torch.tan, 1, "language")
ceil = Operator("ceil", torch.ceil, 1, "language")
floor = Operator("floor", torch.floor, 1, "language")
trunc = Operator("trunc", torch.trunc, 1, "language")
negative = Operator("negative", torch.neg, 1, "language")

# Placeholders that no ALU computes.
bypass = Operator("bypass", _plain(lambda x: x), 1, "bypass")
average = Operator("average", _plain(lambda x: x), 1, "average", reduce=lambda v: v.mean(-1))


def as_operator(value: Any) -> Operator:
    """The operator that an `op=` argument names; nl.max, nl.min and nl.sum stand for the operator they reduce with.

    Raises:
        NkiValidationError: it names none.
    """
    if type(value) is Operator:
        return value
    operator = getattr(value, "operator", None)
    if type(operator) is not Operator:
        fail("operator", f"{value!r} is not an operator of nki.language")
    return operator
