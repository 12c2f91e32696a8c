"""The first instructions against their float64 evaluation, over shapes, dtypes and views."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn.sim import NkiValidationError, jit, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import dtypes, gpsimd, operators, scalar, tensor, vector

# One float32 operation, or a function of a few of them, on values of size 1 to 10; then the rounding of the dtype.
RTOL = {
    "float32": 4 * 2.0**-23,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
ATOL = {"float32": 1e-6, "bfloat16": 1e-6, "float16": 6e-8, "float8_e4m3": 2.0**-10, "float8_e5m2": 2.0**-17}
FLOATS = st.sampled_from(sorted(RTOL))
SHAPES = st.tuples(st.sampled_from([1, 7, 32, 64, 128]), st.integers(1, 40))
SEEDS = st.integers(0, 2**31)
cases = settings(max_examples=40, deadline=None)


def sample(seed, shape, dtype="float32", low=-4.0, high=4.0):
    """float64 values that `dtype` holds exactly."""
    return dtypes.round_to(np.random.default_rng(seed).uniform(low, high, shape), dtype)


def tile(values, dtype):
    """An SBUF tile with these values, every other column of a wider one so that it has a stride."""
    wide = nl.ndarray((values.shape[0], 2 * values.shape[1]), getattr(nl, dtype))
    nisa.memset(wide, 0)
    view = wide[:, ::2]
    nisa.dma_copy(view, values)
    return view


def run(body, *arrays, target="trn3"):
    """Results, as float64, of instructions that `body` issues on HBM float32 arrays; it returns SBUF or PSUM tiles."""

    def kernel(*inputs):
        outs = []
        for result in body(*inputs):
            sbuf = nl.ndarray(result.shape, nl.float32)
            nisa.tensor_copy(sbuf, result)
            out = nl.ndarray(result.shape, nl.float32, nl.shared_hbm)
            nl.store(out, sbuf)
            outs.append(out)
        return tuple(outs)

    results = simulate(kernel, target=target)(*(np.asarray(a, np.float32) for a in arrays))
    return [r.astype(np.float64) for r in results]


def close(got, expected, dtype="float32"):
    np.testing.assert_allclose(got, dtypes.round_to(expected, dtype), rtol=RTOL[dtype], atol=ATOL[dtype])


@given(st.sampled_from(sorted(set(operators.ARITHMETIC) - {"power"})), SHAPES, FLOATS, FLOATS, FLOATS, SEEDS)
@cases
def test_tensor_tensor(op, shape, left, right, result, seed):
    x, y = sample(seed, shape, left), sample(seed + 1, shape, right)

    def body(a, b):
        dst = nl.ndarray(shape, getattr(nl, result))
        nisa.tensor_tensor(dst, tile(a, left), tile(b, right), getattr(nl, op))
        return [dst]

    close(run(body, x, y)[0], vector.tensor_tensor(x, y, op), result)


@given(
    st.sampled_from(["add", "subtract", "multiply", "maximum", "minimum", "greater", "abs", "square", "relu"]),
    st.sampled_from(["add", "subtract", "multiply", "minimum", None]),
    st.booleans(), st.booleans(), st.booleans(), SHAPES, FLOATS, SEEDS,
)  # fmt: skip
@cases
def test_tensor_scalar(op0, op1, vectors, reverse0, reverse1, shape, dtype, seed):
    x = sample(seed, shape, dtype)
    first, second = (sample(seed + i, (shape[0], 1)) if vectors else float(sample(seed + i, ())) for i in (1, 2))
    unary = op0 in operators.UNARY
    reverse0 = reverse0 and not unary
    given0, given1 = None if unary else first, None if op1 is None else second

    def body(a, *columns):
        columns = [nl.load(column) for column in columns] or [given0, given1]
        dst = nl.ndarray(shape, getattr(nl, dtype))
        nisa.tensor_scalar(
            dst, tile(a, dtype), getattr(nl, op0), None if unary else columns[0], reverse0,
            None if op1 is None else getattr(nl, op1), None if op1 is None else columns[1], reverse1,
        )  # fmt: skip
        return [dst]

    expected = vector.tensor_scalar(x, op0, given0, reverse0, op1, given1, reverse1)
    got = run(body, x, *((first, second) if vectors else ()))[0]
    exact = dtypes.round_to(expected, dtype)
    np.testing.assert_allclose(got, exact, rtol=2 * RTOL[dtype], atol=max(ATOL[dtype], 4e-6))


@given(
    st.sampled_from(["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"]),
    st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "uint32"]), SHAPES, SEEDS,
)  # fmt: skip
@cases
def test_bitwise_operators(op, dtype, shape, seed):
    info = np.iinfo(dtype)
    random = np.random.default_rng(seed)
    x = random.integers(info.min, info.max, shape, dtype=np.int64, endpoint=True)
    y = random.integers(0, info.bits, shape) if "shift" in op else random.integers(info.min, info.max, shape)

    def kernel(a, b):
        dst, both = nl.ndarray(shape, a.dtype), nl.ndarray(shape, a.dtype)
        nisa.tensor_tensor(dst, nl.load(a), nl.load(b), getattr(nl, op))
        nisa.tensor_scalar(both, dst, nl.invert, None, op1=nl.bitwise_and, operand1=85)
        outs = [nl.ndarray(shape, a.dtype, nl.shared_hbm) for _ in range(2)]
        nl.store(outs[0], dst)
        nl.store(outs[1], both)
        return tuple(outs)

    got, masked = simulate(kernel)(x.astype(dtype), y.astype(dtype))
    expected = operators.bitwise(op, x, y, dtype)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(masked, operators.bitwise("bitwise_and", ~expected, 85, dtype))


@given(st.sampled_from(["add", "subtract", "multiply"]), st.sampled_from(["int32", "uint32"]), SHAPES, SEEDS)
@cases
def test_integer_arithmetic_on_gpsimd_is_exact(op, dtype, shape, seed):
    info = np.iinfo(dtype)
    x, y = np.random.default_rng(seed).integers(info.min, info.max, (2, *shape), endpoint=True)

    def kernel(a, b):
        dst = nl.ndarray(shape, a.dtype)
        nisa.tensor_tensor(dst, nl.load(a), nl.load(b), getattr(nl, op))
        out = nl.ndarray(shape, a.dtype, nl.shared_hbm)
        nl.store(out, dst)
        return out

    got = simulate(kernel)(x.astype(dtype), y.astype(dtype))
    np.testing.assert_array_equal(got, gpsimd.tensor_tensor_int32(x, y, op, dtype))


@given(st.sampled_from(["add", "multiply", "maximum", "minimum"]), st.integers(1, 3), st.booleans(), FLOATS, SEEDS)
@cases
def test_tensor_reduce(op, axes, negate, dtype, seed):
    shape = (32, 3, 4, 5)
    x = sample(seed, shape, dtype, 0.5, 1.5)
    axis = tuple(range(4 - axes, 4))

    def body(a):
        data = nl.load(a, dtype=getattr(nl, dtype))
        dst = nl.ndarray((*shape[: 4 - axes], *(1 for _ in axis)), nl.float32)
        nisa.tensor_reduce(dst, getattr(nl, op), data, axis, negate, keepdims=True)
        return [dst]

    expected = vector.tensor_reduce(op, x, axis, negate, keepdims=True)
    np.testing.assert_allclose(run(body, x)[0], expected, rtol=60 * 2.0**-23)


ACTIVATIONS = ["copy", "square", "sigmoid", "relu", "gelu", "gelu_dx", "gelu_apprx_tanh", "gelu_apprx_sigmoid",
               "gelu_apprx_sigmoid_dx", "silu", "silu_dx", "tanh", "softplus", "mish", "erf", "erf_dx", "exp", "log",
               "sin", "arctan", "sqrt", "rsqrt", "reciprocal", "sign", "abs"]  # fmt: skip


@given(st.sampled_from(ACTIVATIONS), st.booleans(), SHAPES, FLOATS, SEEDS)
@cases
def test_activation_with_scale_bias_and_accumulators(op, vectors, shape, dtype, seed):
    x = sample(seed, shape, dtype, 0.25, 1.0)
    scale, bias = (sample(seed + i, (shape[0], 1) if vectors else (), low=0.125, high=0.5) for i in (1, 2))

    def body(a, *columns):
        s, b = [nl.load(column) for column in columns] or (float(scale), float(bias))
        dst, total = nl.ndarray(shape, nl.float32), nl.ndarray((shape[0], 1), nl.float32)
        command = nisa.reduce_cmd
        data = tile(a, dtype)
        nisa.activation(dst, getattr(nl, op), data, b, s, nl.add, None, command.reset_reduce)
        nisa.activation(dst, getattr(nl, op), data, b, s, nl.add, total, command.reduce)
        return [dst, total]

    got, total = run(body, x, *((scale, bias) if vectors else ()))
    expected = scalar.apply(op, x * scale + bias)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(total, 2 * expected.sum(1, keepdims=True), rtol=4e-5, atol=1e-4)


def test_scalar_engine_sin_extends_a_cubic():
    values = np.full((1, 2), [[9.0, -9.0]])

    def kernel(a):
        out = nl.ndarray((1, 2), nl.float32, nl.shared_hbm)
        dst = nl.ndarray((1, 2), nl.float32)
        nisa.activation(dst, nl.sin, nl.load(a))
        nl.store(out, dst)
        return out

    with pytest.raises(NkiValidationError, match="activation-range"):
        simulate(kernel)(np.float32(values))
    np.testing.assert_allclose(simulate(kernel, checks=False)(np.float32(values)), [[27.65, -27.65]], atol=0.01)


@given(
    st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"]),
    st.integers(1, 128), st.integers(1, 128), st.integers(1, 64), st.sampled_from(["trn2", "trn3"]), SEEDS,
)  # fmt: skip
@cases
def test_nc_matmul_accumulates(dtype, k, m, n, target, seed):
    x, y = sample(seed, (2, k, m), dtype), sample(seed + 1, (2, k, n), dtype)

    def body(a, b):
        auto = nl.ndarray((m, n), nl.float32, nl.psum)
        explicit = nl.ndarray((m, n), nl.float32, nl.psum)
        for i in range(2):
            left, right = nl.load(a[i], dtype=getattr(nl, dtype)), nl.load(b[i], dtype=getattr(nl, dtype))
            nisa.nc_matmul(auto, left, right)
            nisa.nc_matmul(explicit, left, right, accumulate=i > 0)
        return [auto, explicit]

    auto, explicit = run(body, x, y, target=target)
    expected = tensor.nc_matmul(x[1], y[1], tensor.nc_matmul(x[0], y[0]))
    # A float32 sum of 2k products of size at most 16.
    np.testing.assert_allclose(auto, expected, atol=2 * k * 16 * 2.0**-23, rtol=1e-6)
    np.testing.assert_array_equal(auto, explicit)


def test_matmul_overwrites_exactly_what_no_matmul_wrote():
    x, y = sample(0, (8, 4)), sample(1, (8, 6))

    def body(a, b):
        acc = nl.ndarray((4, 6), nl.float32, nl.psum)
        left, right = nl.load(a), nl.load(b)
        nisa.nc_matmul(acc[:, 0:3], left, right[:, 0:3])
        nisa.nc_matmul(acc, left, right)
        return [acc]

    expected = tensor.nc_matmul(x, y)
    expected[:, :3] *= 2
    np.testing.assert_allclose(run(body, x, y)[0], expected, rtol=1e-5, atol=1e-5)


def test_double_row_contracts_over_the_pair():
    x, y = sample(0, (64, 2, 32), "float8_e4m3"), sample(1, (64, 2, 40), "float8_e5m2")

    def body(a, b):
        acc = nl.ndarray((32, 40), nl.float32, nl.psum)
        left, right = nl.load(a, dtype=nl.float8_e4m3), nl.load(b, dtype=nl.float8_e5m2)
        nisa.nc_matmul(acc, left, right, perf_mode=nisa.matmul_perf_mode.double_row)
        return [acc]

    np.testing.assert_allclose(run(body, x, y)[0], tensor.nc_matmul_double_row(x, y), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("unit", [nisa.engine.tensor, nisa.engine.vector])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3", "int32"])
def test_transposes_are_bit_exact(unit, dtype):
    size = (32, 24) if unit is nisa.engine.vector else (128, 96)
    bits = torch.randint(-(2**31), 2**31, size, dtype=torch.int64).to(torch.int32)

    def kernel(x):
        data = nl.load(x).view(getattr(nl, dtype))[:, 0 : size[1]]
        dst = nl.ndarray(size[::-1], getattr(nl, dtype), nl.psum)
        nisa.nc_transpose(dst, data, engine=unit)
        sbuf = nl.ndarray(size[::-1], getattr(nl, dtype))
        nisa.tensor_copy(sbuf, dst)
        out = nl.ndarray(size[::-1], getattr(nl, dtype), nl.shared_hbm)
        nl.store(out, sbuf)
        return out

    got = simulate(kernel, target="trn2")(bits)
    expected = bits.view(got.dtype)[:, : size[1]].t().contiguous()
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 4)), min_size=1, max_size=4), SEEDS)
@cases
def test_iota_and_affine_select(pattern, seed):
    pattern = [list(pair) for pair in pattern]
    elements = int(np.prod([num for _, num in pattern]))
    x = sample(seed, (16, elements))

    def body(a):
        numbers, chosen = nl.ndarray((16, elements), nl.int32), nl.ndarray((16, elements), nl.float32)
        nisa.iota(numbers, pattern, offset=-3, channel_multiplier=2)
        nisa.affine_select(chosen, pattern, 2, nl.load(a), -1.0, nl.greater_equal, offset=-3)
        return [numbers, chosen]

    numbers, chosen = run(body, x)
    expected = gpsimd.iota(16, pattern, -3, 2).reshape(16, -1)
    np.testing.assert_array_equal(numbers, expected)
    np.testing.assert_array_equal(chosen, np.where(expected >= 0, np.float32(x), -1.0))


@pytest.mark.parametrize("function", ["softmax", "rms_norm", "mean", "var", "sin", "where", "matmul", "transpose"])
def test_compound_functions(function):
    x, w = sample(0, (64, 48)), sample(1, (64, 48))

    def kernel(a, b):
        p, q = nl.load(a), nl.load(b)
        result = {
            "softmax": lambda: nl.softmax(p),
            "rms_norm": lambda: nl.rms_norm(p, q, axis=1, n=48),
            "mean": lambda: nl.mean(p, axis=1),
            "var": lambda: nl.var(p, axis=1),
            "sin": lambda: nl.sin(nl.multiply(p, 10.0)),
            "where": lambda: nl.where(nl.greater(p, q), p, 0.0),
            "matmul": lambda: nl.copy(nl.matmul(p, q, transpose_x=True)),
            "transpose": lambda: nl.copy(nl.transpose(p)),
        }[function]()
        out = nl.ndarray(result.shape, nl.float32, nl.shared_hbm)
        nl.store(out, result)
        return out

    powers = np.exp(x - x.max(1, keepdims=True))
    expected = {
        "softmax": powers / powers.sum(1, keepdims=True),
        "rms_norm": x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w,
        "mean": x.mean(1, keepdims=True),
        "var": x.var(1, keepdims=True),
        "sin": np.sin(10 * x),
        "where": np.where(x > w, x, 0),
        "matmul": x.T @ w,
        "transpose": x.T,
    }[function]
    np.testing.assert_allclose(simulate(kernel)(np.float32(x), np.float32(w)), expected, rtol=1e-5, atol=2e-5)


OVERLAPPING = {
    "tensor_copy": lambda dst, src: nisa.tensor_copy(dst=dst, src=src),
    "activation": lambda dst, src: nisa.activation(dst=dst, op=nl.copy, data=src),
    "tensor_scalar": lambda dst, src: nisa.tensor_scalar(dst=dst, data=src, op0=nl.add, operand0=0.0),
    "tensor_tensor": lambda dst, src: nisa.tensor_tensor(dst=dst, data1=src, data2=src, op=nl.maximum),
    "dma_copy": lambda dst, src: nisa.dma_copy(dst=dst, src=src),
}


@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16], ids=str)
@pytest.mark.parametrize("name", OVERLAPPING)
def test_input_is_read_before_an_overlapping_output_is_written(name, dtype):
    @jit
    def shift(x):
        tile = nl.ndarray(x.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        OVERLAPPING[name](tile[:, 1:], tile[:, :-1])
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    np.testing.assert_array_equal(shift(x), np.concatenate([x[:, :1], x[:, :-1]], axis=1))
