"""nki.language functions on tiles against float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import jit, simulate
from nki_parallel_attn.sim import language as nl

from .oracle.operators import arithmetic, bitwise
from .oracle.scalar import ACTIVATIONS

# Engines compute in float32; library functions are good to a few units in the last place.
RTOL, ATOL = 4e-6, 4e-6
SHAPE = (32, 48)
RNG = np.random.default_rng(0)


def run(function: Callable[..., Any], *arrays: np.ndarray, target: str = "trn3") -> np.ndarray:
    """function(tiles) on the simulator, stored."""

    @jit
    def kernel(*inputs):
        tiles = []
        for x in inputs:
            t = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=t, src=x)
            tiles.append(t)
        result = function(*tiles)
        if nl.is_psum(result.buffer):
            result = nl.copy(result)
        out = nl.ndarray(result.shape, dtype=result.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=result)
        return out

    result: np.ndarray = simulate(kernel, target=target)(*arrays)
    return result


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape or SHAPE).astype(np.float32)


def check(got: np.ndarray, expected: np.ndarray, scale: float = 1.0) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=RTOL * scale, atol=ATOL * scale)


POSITIVE = {"log", "sqrt", "rsqrt", "reciprocal"}
BOUNDED = {"arctan"}
ROUNDING = {
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "negative": np.negative,
    "logical_not": lambda x: (x == 0).astype(np.float64),
    "cos": np.cos,
    "tan": np.tan,
}
UNARY = sorted((set(ACTIVATIONS) | set(ROUNDING)) - {"copy", "tan"})


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    x = normal()
    if name in POSITIVE:
        x = np.abs(x) + np.float32(0.1)
    if name in BOUNDED:
        x = np.clip(x, -1.5, 1.5)
    if name == "logical_not":
        x[:, ::3] = 0
    function = ROUNDING.get(name) or ACTIVATIONS[name]
    check(run(getattr(nl, name), x), function(x.astype(np.float64)))


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_trigonometry_on_the_whole_domain(name):
    x = (normal() * 30).astype(np.float32)
    exact = getattr(np, name)(x.astype(np.float64))
    # The reduction to [-pi, pi] is in float32: an error of an ulp of x, times the slope.
    slope = 1 / np.cos(x.astype(np.float64)) ** 2 if name == "tan" else 1.0
    bound = 8 * 2.0**-24 * (np.abs(x) + 4) * slope + ATOL
    assert (np.abs(run(getattr(nl, name), x) - exact) <= bound).all()


BINARY = ["add", "subtract", "multiply", "maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater"]
BINARY += ["greater_equal", "logical_and", "logical_or", "logical_xor", "abs_max", "abs_min"]


@pytest.mark.parametrize("name", BINARY)
def test_binary_on_tiles_and_numbers(name):
    x, y = np.round(normal() * 2), np.round(normal() * 2)
    check(run(getattr(nl, name), x, y), arithmetic(name, x, y))
    check(run(lambda a: getattr(nl, name)(a, 2.0), x), arithmetic(name, x, np.full_like(x, 2.0)))


@pytest.mark.parametrize(
    ("name", "function"), [("divide", np.divide), ("fmod", np.fmod), ("mod", np.mod), ("power", np.power)]
)
def test_division_and_power(name, function):
    x, y = np.abs(normal()) + np.float32(0.5), np.abs(normal()) + np.float32(0.5)
    exact = function(x.astype(np.float64), y.astype(np.float64))
    got = run(getattr(nl, name), x, y)
    if name in ("mod", "fmod"):
        # The remainder is off by the rounding of the quotient's multiple, and by y where the quotient rounds across.
        error = np.abs(got - exact)
        assert (np.minimum(error, np.abs(error - y)) <= 4e-6 * (x + y)).all()
    else:
        check(got, exact, scale=4)


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint8"])
def test_bitwise(name, dtype):
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max, SHAPE, endpoint=True, dtype=dtype)
    y = RNG.integers(0, 8, SHAPE, dtype=dtype) if "shift" in name else x[::-1].copy()
    got = run(getattr(nl, name), x, y)
    expected = bitwise(name, x, y, dtype)
    bits = info.bits
    np.testing.assert_array_equal(np.asarray(got, np.int64) & (2**bits - 1), np.asarray(expected) & (2**bits - 1))


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "mean": np.mean,
    "var": np.var,
    "prod": np.prod,
}


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
@pytest.mark.parametrize("axis", [1, [1, 2], 2])
def test_reductions(name, axis):
    x = (1 + normal(16, 6, 4) / 8).astype(np.float32) if name == "prod" else normal(16, 6, 4)
    if axis == 1:
        x = x.reshape(16, 24)
    axes = tuple(axis) if isinstance(axis, list) else axis
    expected = REDUCTIONS[name](x.astype(np.float64), axis=axes, keepdims=True)
    got = run(lambda t: getattr(nl, name)(t, axis=axis, keepdims=True), x)
    np.testing.assert_allclose(got.reshape(-1), expected.reshape(-1), rtol=24 * 2.0**-22, atol=24 * 2.0**-22)


def test_all():
    x = np.ones((8, 5), np.float32)
    x[3, 2] = 0
    check(run(lambda t: nl.all(t, axis=1), x).reshape(-1), np.all(x, axis=1).astype(np.float64))


def test_softmax():
    x = normal() * 5
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    check(run(lambda t: nl.softmax(t, axis=1), x), e / e.sum(1, keepdims=True))


def test_rms_norm():
    x, w = normal(), normal()
    exact = x / np.sqrt((x.astype(np.float64) ** 2).sum(1, keepdims=True) / x.shape[1] + 1e-6) * w
    check(run(lambda t, g: nl.rms_norm(t, g, axis=1, n=x.shape[1]), x, w), exact, scale=4)


def test_where():
    condition, x, y = (normal() > 0).astype(np.float32), normal(), normal()
    check(run(nl.where, condition, x, y), np.where(condition > 0, x, y).astype(np.float64))


def test_copy_transpose_matmul_and_broadcast():
    x, y = normal(32, 32), normal(32, 48)
    check(run(nl.copy, x), x.astype(np.float64))
    check(run(nl.transpose, x), x.T.astype(np.float64))
    check(run(nl.matmul, x, y), x.astype(np.float64) @ y, scale=32)
    check(run(lambda a, b: nl.matmul(a, b, transpose_x=True), x, y), x.T.astype(np.float64) @ y, scale=32)
    check(run(lambda t: nl.broadcast_to(t, (32, 5)), x[:, :1].copy()), np.repeat(x[:, :1], 5, 1).astype(np.float64))
    check(run(lambda t: nl.copy(nl.expand_dims(t, 1)), x), x[:, None, :].astype(np.float64))


def test_gather_flattened():
    x, index = normal(), RNG.integers(0, SHAPE[1], (SHAPE[0], 9), dtype=np.uint32)
    check(run(nl.gather_flattened, x, index), np.take_along_axis(x, index.astype(np.int64), 1).astype(np.float64))


@pytest.mark.parametrize("name", ["exp", "add"])
def test_results_are_rounded_to_the_dtype_that_is_asked_for(name):
    x = normal()
    operands = (x,) if name == "exp" else (x, x)
    got = run(lambda *tiles: getattr(nl, name)(*tiles, dtype=nl.bfloat16), *operands)
    exact = np.exp(x.astype(np.float64)) if name == "exp" else 2.0 * x
    assert str(got.dtype) == "bfloat16"
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-8, atol=0)


def test_device_print_shows_the_values(capsys):
    run(lambda t: (nl.device_print("tile", t), t)[1], np.full((2, 2), 7, np.float32))
    assert "tile" in (out := capsys.readouterr().out) and "7." in out
