"""The oracle itself, on the documentation's own examples and on values worked out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from . import collectives, dma, dtypes, gpsimd, operators, registers, scalar, tensor, vector

ML_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape) * scale


# dtypes


@pytest.mark.parametrize("name", ML_DTYPES)
def test_round_to_agrees_with_ml_dtypes_on_float32_values(name):
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    hard = np.float32(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 240, 247.9, 248, 448, 464, 464.1, 57344, 61440, 65504, 65520]
    )
    values = np.concatenate([bits.view(np.float32), hard, -hard, np.exp2(np.arange(-149, 128, dtype=np.float32))])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(ML_DTYPES[name]).astype(np.float64)
    result = dtypes.round_to(values, name)
    np.testing.assert_array_equal(result, expected)
    kept = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result[kept]), np.signbit(expected[kept]))


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e4m3fn", "float8_e5m2"])
def test_all_values_of_fp8_agree_with_ml_dtypes(name):
    expected = np.arange(256, dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(dtypes.all_values(name), expected)


def test_all_values_of_fp4():
    assert dtypes.all_values("float4_e2m1fn").tolist() == [
        0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6,
    ]  # fmt: skip


def test_tfloat32_keeps_ten_mantissa_bits():
    assert dtypes.round_to(1 + 2.0**-10, "tfloat32") == 1 + 2.0**-10
    assert dtypes.round_to(1 + 2.0**-11, "tfloat32") == 1  # tie to even
    assert dtypes.round_to(1 + 3 * 2.0**-11, "tfloat32") == 1 + 2.0**-9  # tie to even, upwards
    assert dtypes.round_to(2.0**-149, "tfloat32") == 0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("int8", 2.5, 2),
        ("int8", 3.5, 4),
        ("int8", -2.5, -2),
        ("int8", 200, 127),
        ("int8", -200, -128),
        ("uint8", -1, 0),
        ("uint16", 7e4, 65535),
        ("int32", 3e9, 2**31 - 1),
        ("uint32", np.inf, 2**32 - 1),
        ("int32", -np.inf, -(2**31)),
        ("int16", np.nan, 0),
        ("bool_", 0.5, 1),
    ],
)
def test_integers_round_to_even_and_saturate(name, value, expected):
    assert dtypes.round_to(value, name) == expected


def test_convert_goes_through_float32_unless_the_dtypes_agree():
    assert dtypes.convert(2**24 + 1, "int32", "int32") == 2**24 + 1
    assert dtypes.convert(2**24 + 1, "int32", "uint32") == 2**24
    # FP32_MIN becomes -inf in the narrower formats: isa `range_select`, "Note on numerical stability".
    for name in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2"):
        assert dtypes.convert(vector.FP32_MIN, "float32", name) == -np.inf


def test_ulp_is_the_spacing():
    for name in ("bfloat16", "float8_e5m2", "float16"):
        value = dtypes.round_to(1.3, name)
        step = dtypes.ulp(value, name)
        assert dtypes.round_to(value + step, name) == value + step
        assert dtypes.round_to(value + 0.4 * step, name) == value


# operators


def test_abs_max_and_abs_min_keep_the_sign_and_return_y_on_ties():
    assert operators.arithmetic("abs_max", -5.0, 3.0) == -5
    assert operators.arithmetic("abs_min", -5.0, 3.0) == 3
    assert operators.arithmetic("abs_max", 1.0, -1.0) == -1
    assert operators.arithmetic("abs_min", 1.0, -1.0) == -1


def test_bitwise_operators_work_on_patterns():
    assert operators.bitwise("invert", 5, None, "uint8") == 250
    assert operators.bitwise("invert", 5, None, "int8") == -6
    assert operators.bitwise("right_shift", -1, 4, "int8") == 15  # logical
    assert operators.bitwise("left_shift", 0x81, 1, "uint8") == 2
    assert operators.bitwise("left_shift", 1, 32, "uint32") == 0
    assert operators.bitwise("bitwise_xor", -1, 1, "int32") == -2


def test_reductions():
    x = np.array([[3.0, 1.0, 2.0]])
    assert operators.reduce("subtract", x, 1).item() == 0
    assert operators.reduce("multiply", x, 1, keepdims=True).shape == (1, 1)
    assert operators.reduce("logical_xor", x, 1).item() == 1
    assert operators.reduce("logical_and", np.array([[1.0, 0.0]]), 1).item() == 0
    y = random(2, 3, 4)
    np.testing.assert_allclose(operators.reduce("subtract", y, (1, 2)), y[:, 0, 0] - (y.reshape(2, -1)[:, 1:]).sum(1))


# tensor engine


def test_nc_matmul_is_stationary_transposed_times_moving():
    stationary = np.array([[1.0, 2.0], [3.0, 4.0]])
    moving = np.array([[5.0], [6.0]])
    assert tensor.nc_matmul(stationary, moving).tolist() == [[23], [34]]
    assert tensor.nc_matmul(stationary, moving, [[1.0], [2.0]]).tolist() == [[24], [36]]
    x = random(8, 5)
    np.testing.assert_array_equal(tensor.nc_matmul(x, np.eye(8)), tensor.nc_transpose(x))


def test_double_row_is_one_matmul_of_twice_the_contraction():
    # isa `nc_matmul`, "Layout": [1, 256] @ [256, 3] with tiles [128, 2, 1] and [128, 2, 3]; halves are 128 apart.
    x, y = random(256, 1), random(256, 3, seed=1)
    halves = [v.reshape(2, 128, -1).transpose(1, 0, 2) for v in (x, y)]
    np.testing.assert_allclose(tensor.nc_matmul_double_row(*halves), x.T @ y, rtol=1e-12)


def test_bfloat16_psum_rounds_at_every_write():
    assert tensor.accumulate_bfloat16([np.array(256.0), np.array(1.0), np.array(1.0)]) == 256
    assert tensor.accumulate_bfloat16([np.array(256.0), np.array(2.0)]) == 258


def test_mx_matmul_equals_the_matmul_of_dequantised_operands():
    rng = np.random.default_rng(0)
    x, y = rng.integers(-4, 5, (32, 6, 4)).astype(float), rng.integers(-4, 5, (32, 3, 4)).astype(float)
    xs, ys = rng.integers(125, 130, (4, 6)), rng.integers(125, 130, (4, 3))
    expected = np.zeros((6, 3))
    for m in range(6):
        for n in range(3):
            for p in range(32):
                for q in range(4):
                    scale = 2.0 ** (int(xs[p // 8, m]) - 127 + int(ys[p // 8, n]) - 127)
                    expected[m, n] += x[p, m, q] * y[p, n, q] * scale
    np.testing.assert_allclose(tensor.nc_matmul_mx(x, y, xs, ys), expected)


def test_scales_lie_in_the_quadrant_of_their_group():
    dense = np.arange(16, dtype=np.uint8)[:, None]
    layout = tensor.scatter_scales(dense, 128, offset=4)
    assert layout.shape == (128, 1)
    for group in range(16):
        assert layout[group // 4 * 32 + 4 + group % 4, 0] == group
    assert tensor.scatter_scales(dense[:4], 32).tolist() == [[0], [1], [2], [3]]


# scalar engine


def test_activations_at_hand_values():
    assert scalar.apply("gelu", 1.0) == pytest.approx(0.8413447460685429)
    assert scalar.apply("gelu_apprx_tanh", 1.0) == pytest.approx(0.8411919906082768)
    assert scalar.apply("gelu_apprx_sigmoid", 1.0) == pytest.approx(1 / (1 + math.exp(-1.702)))
    assert scalar.apply("silu", 2.0) == pytest.approx(2 / (1 + math.exp(-2)))
    assert scalar.apply("softplus", 800.0) == 800
    assert scalar.apply("softplus", 0.0) == pytest.approx(math.log(2))
    assert scalar.apply("mish", 1.0) == pytest.approx(math.tanh(math.log1p(math.e)))
    assert scalar.apply("sigmoid", -800.0) == 0
    assert scalar.apply("prelu", -2.0, slope=0.25) == -0.5
    assert scalar.apply("sign", np.array([-3.0, 0.0, 2.0])).tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    ("function", "derivative"),
    [("gelu", "gelu_dx"), ("gelu_apprx_sigmoid", "gelu_apprx_sigmoid_dx"), ("silu", "silu_dx"), ("erf", "erf_dx")],
)
def test_derivatives_are_derivatives(function, derivative):
    x, h = np.linspace(-4, 4, 81), 1e-5
    slope = (scalar.apply(function, x + h) - scalar.apply(function, x - h)) / (2 * h)
    np.testing.assert_allclose(scalar.apply(derivative, x), slope, atol=1e-8)


def test_activation_of_the_documentation_and_its_registers():
    # nki/test/test_nki_isa_activation.py: square(b * 2 + c).
    b, c = random(4, 6), random(4, 1, seed=1)
    result, registers_ = scalar.activation("square", b, bias=c, scale=2.0)
    np.testing.assert_allclose(result, (b * 2 + c) ** 2)
    assert not registers_.any()
    _, first = scalar.activation("copy", b, reduce_cmd="reset_reduce", registers=np.full((4, 1), 9.0))
    np.testing.assert_allclose(first, b.sum(1, keepdims=True))
    _, second = scalar.activation("copy", b, reduce_cmd="reduce", registers=first)
    np.testing.assert_allclose(second, 2 * first)
    assert not scalar.activation("copy", b, reduce_cmd="reset", registers=first)[1].any()
    np.testing.assert_array_equal(scalar.activation("copy", b, registers=first)[1], first)


def test_activate2_of_the_documentation():
    x = random(3, 5)
    result, _ = scalar.activate2("gelu", x, 2.0, 0.5, "multiply", "add")
    np.testing.assert_allclose(result, scalar.apply("gelu", 2 * x + 0.5))
    result, _ = scalar.activate2("copy", x, 3.0, 0.0, "subtract", "bypass", reverse0=True)
    np.testing.assert_allclose(result, 3 - x)
    _, largest = scalar.activate2("copy", x, 0, 0, "bypass", "bypass", reduce_op="abs_max", reduce_cmd="reset_reduce")
    np.testing.assert_allclose(np.abs(largest[:, 0]), np.abs(x).max(1))


def test_valid_ranges():
    assert scalar.in_valid_range("log", [0.0, 1.0, 2.0**65]).tolist() == [False, True, False]
    assert scalar.in_valid_range("reciprocal", [-1.0, 0.0, -(2.0**43)]).tolist() == [True, False, False]
    assert scalar.in_valid_range("sin", [9.0, -3.0]).tolist() == [False, True]
    assert scalar.in_valid_range("exp", [1e30]).all()


# vector engine


def test_tensor_scalar_of_the_documentation():
    # nki/test/test_nki_isa_tensor_scalar.py: a - 1, 1 - c, e * f + 2.5.
    x, f = random(4, 6), random(4, 1, seed=1)
    np.testing.assert_allclose(vector.tensor_scalar(x, "subtract", 1.0), x - 1)
    np.testing.assert_allclose(vector.tensor_scalar(x, "subtract", 1.0, reverse0=True), 1 - x)
    result = vector.tensor_scalar(x, "multiply", f, op1="add", operand1=2.5)
    np.testing.assert_allclose(result, x * f + 2.5)
    assert vector.tensor_scalar_bitwise([[6]], "uint8", "bitwise_and", 3, op1="left_shift", operand1=1).item() == 4


def test_scalar_tensor_tensor_is_two_instructions():
    x, y, s = random(3, 4), random(3, 4, seed=1), random(3, 1, seed=2)
    expected = y - (s - x)
    result = vector.scalar_tensor_tensor(x, "subtract", s, "subtract", y, reverse0=True, reverse1=True)
    np.testing.assert_allclose(result, expected)


def test_tensor_tensor_scan_of_the_documentation():
    a, b = random(4, 9), random(4, 9, seed=1)
    golden = np.zeros((4, 9))
    golden[:, 0] = b[:, 0]
    for i in range(1, 9):
        golden[:, i] = a[:, i] * golden[:, i - 1] + b[:, i]
    np.testing.assert_allclose(vector.tensor_tensor_scan(a, b, 0.0, "multiply", "add"), golden)


@pytest.mark.parametrize(
    ("op1", "imm1", "cmd", "golden"),
    [
        ("add", None, "reset_reduce", np.arange(2.0, 130, 2)),
        ("multiply", None, "reset_reduce", 2.0 ** np.arange(1, 65)),
        ("maximum", None, "reset_reduce", np.full(64, 2.0)),
        ("add", 1.0, "load_reduce", np.arange(2.0, 130, 2) + 1),
        ("multiply", 0.0, "load_reduce", np.zeros(64)),
        ("minimum", 0.0, "load_reduce", np.zeros(64)),
    ],
)
def test_tensor_scalar_cumulative_of_the_documentation(op1, imm1, cmd, golden):
    # nki/test/test_nki_isa_tensor_scalar_cumulative.py: ones plus one, accumulated.
    result, _ = vector.tensor_scalar_cumulative(np.ones((2, 64)), "add", op1, np.ones((2, 1)), imm1, cmd)
    np.testing.assert_allclose(result, np.broadcast_to(golden, (2, 64)))


def test_tensor_scalar_cumulative_chains():
    src = np.ones((2, 64))
    _, state = vector.tensor_scalar_cumulative(src, "add", "add", 0.0, 1.0, "load_reduce")
    result, _ = vector.tensor_scalar_cumulative(src, "add", "add", 0.0, reduce_cmd="reduce", registers=state)
    np.testing.assert_allclose(result, np.cumsum(src, 1) + 65)


def test_tensor_scalar_reduce():
    x = random(3, 5)
    result, total = vector.tensor_scalar_reduce(x, "multiply", 2.0, "maximum")
    np.testing.assert_allclose(result, 2 * x)
    np.testing.assert_allclose(total, 2 * x.max(1, keepdims=True))
    _, total = vector.tensor_scalar_reduce(x, "multiply", 2.0, "add", "load_reduce", 10.0)
    np.testing.assert_allclose(total, 10 + 2 * x.sum(1, keepdims=True))


def test_predicated_copy_of_the_documentation():
    a, b = random(4, 5), random(4, 5, seed=1)
    mask = (a <= 0.8).astype(np.uint8)
    np.testing.assert_array_equal(vector.tensor_copy_predicated(b, a, mask), np.where(a <= 0.8, a, b))
    np.testing.assert_array_equal(vector.tensor_copy_predicated(b, 7.0, mask, True), np.where(a <= 0.8, b, 7.0))


def test_select_reduce_of_the_documentation():
    on_true, on_false = random(4, 6), random(4, 1, seed=1)
    predicate = np.random.default_rng(2).integers(0, 2, (4, 6))
    result, largest = vector.select_reduce(predicate, on_true, on_false, reduce_cmd="reset_reduce")
    golden = np.where(predicate, on_true, on_false)
    np.testing.assert_array_equal(result, golden)
    np.testing.assert_array_equal(largest, golden.max(1, keepdims=True))
    reverse, none = vector.select_reduce(predicate, on_true, on_false, reverse_pred=True)
    np.testing.assert_array_equal(reverse, np.where(predicate, np.broadcast_to(on_false, (4, 6)), on_true))
    assert none is None


def test_range_select_of_the_documentation():
    on_true = random(4, 100)
    result, largest = vector.range_select(
        on_true, "greater_equal", "less", np.zeros((4, 1)), np.full((4, 1), 64.0), range_start=32
    )
    golden = np.where(np.arange(32, 132) < 64, on_true, vector.FP32_MIN)
    np.testing.assert_array_equal(result, golden)
    np.testing.assert_array_equal(largest, golden.max(1, keepdims=True))


@pytest.mark.parametrize("sizes", [[128], [512, 512], [7], [5, 2, 1]])
def test_bn_stats_and_bn_aggr_of_the_documentation(sizes):
    parts = [random(4, size, seed=size, scale=100) for size in sizes]
    whole = np.concatenate(parts, axis=1)
    stats = np.concatenate([vector.bn_stats(part) for part in parts], axis=1)
    assert stats.shape == (4, 6 * len(sizes))
    expected = np.stack([whole.mean(1), whole.var(1)], axis=1)
    np.testing.assert_allclose(vector.bn_aggr(stats), expected, rtol=1e-10)


def test_bn_stats_layout():
    assert vector.bn_stats([[1.0, 10.0, 3.0, 10.0]]).tolist() == [[2, 2, 2, 2, 10, 0]]


def test_max8_find_index8_and_match_replace8():
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], float)
    assert vector.max8(data).tolist() == [[8, 8, 8, 8, 8, 8, 8, 4]]
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], float)
    # isa `nc_match_replace8`: this very example.
    replaced, places = vector.nc_match_replace8(data, vals, -1.0)
    assert places.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    assert replaced.tolist() == [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]]
    assert vector.nc_find_index8(data, vals).tolist() == [[2, 4, 5, 6, 7, 8, 9, 10]]
    missing = np.array([[99, 8, 8, 8, 8, 8, 8, 8]], float)
    assert vector.nc_find_index8(data, missing)[0, 0] == -1
    unique = np.random.default_rng(0).permutation(40).reshape(2, 20).astype(float)
    best = vector.max8(unique)
    np.testing.assert_array_equal(np.take_along_axis(unique, vector.nc_find_index8(unique, best), 1), best)


def test_stream_shuffle_of_the_documentation():
    x = random(128, 3)
    mask = [(i - 1) % 32 for i in range(32)]
    result = vector.nc_stream_shuffle(np.zeros((128, 3)), x, mask)
    for quadrant in range(4):
        rows = slice(32 * quadrant, 32 * quadrant + 32)
        np.testing.assert_array_equal(result[rows], np.roll(x[rows], 1, axis=0))
    np.testing.assert_array_equal(
        vector.nc_stream_shuffle(np.zeros((32, 3)), x[:1], [0] * 32), np.broadcast_to(x[0], (32, 3))
    )
    kept = vector.nc_stream_shuffle(np.ones((32, 3)), x[:32], [255] * 16 + list(range(16)))
    assert (kept[:16] == 1).all() and (kept[16:] == x[:16]).all()


def test_exponential_of_the_architecture_guide():
    x, m = random(3, 4), random(3, 1, seed=1)
    result, total = vector.exponential(x, m, "reset_reduce")
    np.testing.assert_allclose(result, np.exp(x - m))
    np.testing.assert_allclose(total, np.exp(x - m).sum(1, keepdims=True))
    _, more = vector.exponential(x, m, "load_reduce", reduce_init=total)
    np.testing.assert_allclose(more, 2 * total)
    assert vector.exponential(x)[1] is None


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_quantize_mx_by_hand(name):
    # amax = 3: floor(log2 3) = 1, so X = 2^(1 - (Emax - 1)) and 3 / X = 1.5 * 2^(Emax - 1), below the largest value.
    largest = dtypes.MX_LARGEST_EXPONENT[name]
    src = np.zeros((32, 8))
    src[0, 0], src[7, 3], src[8, 0] = 3.0, -1.0, 2.0**-140
    values, scales = vector.quantize_mx(src, name)
    assert scales.shape == (4, 2)
    assert scales[0, 0] == 127 + 1 - (largest - 1)
    assert values[0, 0] == 1.5 * 2.0 ** (largest - 1)
    assert values[7, 3] == -(2.0 ** (largest - 2))
    assert scales[1, 0] == 0 and scales[0, 1] == 0  # clamped, and an all-zero group


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_quantize_mx_never_saturates_and_is_near(name):
    src = dtypes.round_to(random(32, 64, scale=1e3), "bfloat16")
    values, scales = vector.quantize_mx(src, name)
    assert np.isfinite(values).all()
    scale = np.repeat(np.repeat(2.0 ** (scales.astype(float) - 127), 8, 0), 4, 1)
    error = np.abs(values * scale - src)
    assert (error <= 0.5 * dtypes.ulp(src / scale, name) * scale).all()


def test_dropout_validity():
    x = np.ones((64, 64))
    assert vector.dropout_is_valid(x, x, 0.0) and vector.dropout_is_valid(x, 0 * x, 1.0)
    assert not vector.dropout_is_valid(x, 2 * x, 0.0) and not vector.dropout_is_valid(x, x, 0.5)


# gpsimd engine


def test_iota_of_the_documentation():
    # nki/test/test_nki_isa_iota.py.
    np.testing.assert_array_equal(gpsimd.iota(1, [[1, 512]])[0], np.arange(512))
    np.testing.assert_array_equal(gpsimd.iota(128, [[0, 1]], 0, 1)[:, 0], np.arange(128))
    np.testing.assert_array_equal(gpsimd.iota(1, [[-1, 512]])[0], -np.arange(512))
    np.testing.assert_array_equal(gpsimd.iota(128, [[0, 1]], 5, 2)[:, 0], np.arange(5, 260, 2))
    np.testing.assert_array_equal(
        gpsimd.iota(3, [[10, 2], [1, 4]], 7, 100)[2], 207 + np.array([[0], [10]]) + np.arange(4)
    )


def test_affine_select_of_the_documentation():
    # nki/test/test_nki_isa_affine_select.py: keep strictly below the diagonal.
    a = random(16, 16)
    result = gpsimd.affine_select([[-1, 16]], 1, a, vector.FP32_MIN, "greater")
    golden = a.copy()
    golden[np.triu_indices_from(golden)] = vector.FP32_MIN
    np.testing.assert_array_equal(result, golden)


def test_local_gather_of_the_documentation():
    # nki/test/test_nki_isa_local_gather.py.
    rng = np.random.default_rng(0)
    source = rng.random((128, 512, 4))
    index = np.tile(rng.integers(0, 512, (16, 4)), (8, 1))
    golden = np.empty((128, 64, 4))
    for core in range(8):
        rows = slice(16 * core, 16 * core + 16)
        golden[rows] = np.take(source[rows], index[rows].flatten(order="F"), axis=1)
    np.testing.assert_array_equal(gpsimd.local_gather(source, index * 4, 4), golden)
    np.testing.assert_array_equal(gpsimd.local_gather(source, index * 4, 4, 50), golden[:, :50])


def test_nc_n_gather():
    data, indices = random(4, 2, 5), np.random.default_rng(1).integers(0, 10, (4, 3, 2))
    result = gpsimd.nc_n_gather(data, indices)
    for p in range(4):
        np.testing.assert_array_equal(result[p], data[p].reshape(-1)[indices[p]])


def test_partition_reduce_of_the_documentation():
    a = random(8, 3, 2)
    np.testing.assert_allclose(gpsimd.tensor_partition_reduce("add", a), a.sum(0, keepdims=True))
    np.testing.assert_allclose(gpsimd.tensor_partition_reduce("average", a), a.mean(0, keepdims=True))
    assert gpsimd.tensor_partition_reduce("bitwise_or", [[1], [6]]).tolist() == [[7]]


def test_sequence_bounds_of_the_documentation():
    # nki/test/test_nki_isa_sequence_bounds.py, the worked example.
    bounds = gpsimd.sequence_bounds([[0, 1, 1, 2, 2, 2, 0, 3, 3]])
    assert bounds.tolist() == [[[9, 1, 1, 3, 3, 3, 9, 7, 7], [-1, 3, 3, 6, 6, 6, -1, 9, 9]]]


def test_nonzero_with_count_of_the_documentation():
    src = np.zeros((32, 8), int)
    src[0] = [0, 1, 1, 0, 0, 1, 0, 0]
    result = gpsimd.nonzero_with_count(np.full((32, 9), 77), src, index_offset=16)
    assert result[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    assert result[16].tolist() == [-1] * 8 + [0]
    assert (result[1:16] == 77).all()


def test_topk_reads_the_snake():
    snake = np.random.default_rng(0).permutation(42).astype(float)
    src = np.full((16, 3), 1e9)
    for i, value in enumerate(snake):
        src[i % 16, i // 16] = value
    values, places = gpsimd.topk(src, n=42, k=8)
    assert values[5].tolist() == list(range(34, 42))
    np.testing.assert_array_equal(snake[places[5]], values[5])


def test_int32_arithmetic_is_exact_and_wraps():
    assert gpsimd.tensor_tensor_int32(2**24 + 1, 2, "add") == 2**24 + 3
    assert gpsimd.tensor_tensor_int32(2**31 - 1, 1, "add") == -(2**31)
    assert gpsimd.tensor_tensor_int32(2**32 - 1, 2**32 - 1, "multiply", "uint32") == 1
    assert gpsimd.tensor_tensor_int32(3, 5, "less") == 1


def test_indirect_view_reads_offsets_in_a_snake():
    data = np.arange(32 * 100).reshape(32, 100)
    index = np.random.default_rng(0).integers(0, 100, (32, 2))
    result = gpsimd.indirect_gather(data, index)
    assert result.shape == (32, 32)
    for p in (0, 15, 16, 31):
        for i in (0, 15, 16, 31):
            assert result[p, i] == data[p, index[p // 16 * 16 + i % 16, i // 16]]
    unique = np.stack([np.arange(32) % 16, np.arange(32) % 16 + 16], axis=1)
    back = gpsimd.indirect_scatter(np.zeros((32, 100), int), unique, gpsimd.indirect_gather(data, unique))
    np.testing.assert_array_equal(back[:, :32], data[:, :32])


# dma


def test_access_patterns_of_the_documentation():
    # nki-aps.rst: t[0:16, 8:16]; A[3*128:, 0:256]; rows 0, 2, 4, ... through a vector offset.
    t = np.arange(256).reshape(16, 16)
    np.testing.assert_array_equal(dma.access_pattern((16, 16), [[16, 16], [1, 8]], offset=8), t[:, 8:16])
    big = np.arange(512 * 512).reshape(512, 512)
    index = dma.access_pattern((512, 512), [[512, 128], [1, 256]], scalar_offset=3 * 128)
    np.testing.assert_array_equal(index, big[3 * 128 :, :256])
    index = dma.access_pattern((128, 512), [[512, 64], [1, 512]], vector_offset=2 * np.arange(64)[:, None])
    np.testing.assert_array_equal(index, big[:128][::2])
    # nki.language `fori_loop`: a scalar offset on the last dim moves by single elements.
    assert dma.access_pattern((1, 9), [[1, 1], [1, 1]], scalar_offset=5, indirect_dim=1).item() == 5


def test_indirect_dma_of_the_documentation():
    # nki/test/test_nki_isa_dma_copy.py: rows 3 * i of 128, out-of-bounds rows skipped.
    a = random(128, 8)
    index = dma.access_pattern((128, 8), [[8, 64], [1, 8]], vector_offset=3 * np.arange(64))
    read, inside = dma.gather(a, index, np.full((64, 8), -1.0))
    golden = np.full((64, 8), -1.0)
    golden[:43] = a[3 * np.arange(43)]
    np.testing.assert_array_equal(read, golden)
    assert inside.sum() == 43
    written, _ = dma.scatter(np.full((128, 8), -1.0), index, a[:64])
    golden = np.full((128, 8), -1.0)
    golden[3 * np.arange(43)] = a[:43]
    np.testing.assert_array_equal(written, golden)


def test_dma_compute_and_its_read_modify_write_forms():
    a, b = random(4, 3), random(4, 3, seed=1)
    np.testing.assert_allclose(dma.dma_compute([a, b, a]), 2 * a + b)
    index = dma.access_pattern((8, 3), [[3, 4], [1, 3]], vector_offset=[1, 9, 0, 7])
    base = random(8, 3, seed=2)
    golden = base.copy()
    golden[[1, 0, 7]] += a[[0, 2, 3]]
    np.testing.assert_allclose(dma.scatter_add(base, index, a), golden)
    golden = a.copy()
    golden[[0, 2, 3]] += base[[1, 0, 7]]
    np.testing.assert_allclose(dma.gather_add(a, base, index), golden)


def test_dma_transposes_of_the_documentation():
    x = np.arange(64 * 4 * 8).reshape(64, 4, 8)
    np.testing.assert_array_equal(dma.dma_transpose(x), x.transpose(2, 1, 0))
    np.testing.assert_array_equal(dma.dma_transpose(x[None]), x[None].transpose(3, 1, 2, 0))
    indices = np.arange(32).reshape(32, 1)
    np.testing.assert_array_equal(dma.dma_gather_transpose(x, indices, 32), x[:32].transpose(2, 1, 0))
    two = np.array([[5, 1], [6, 2]])
    np.testing.assert_array_equal(dma.dma_gather_transpose(x[:, 0], two, 3), x[[5, 6, 1], 0].T)


def test_dma_copy_casts_and_reshapes():
    result = dma.dma_copy(np.arange(6) + 0.5, "float32", (2, 3), "int8")
    assert result.tolist() == [[0, 2, 2], [4, 4, 6]]


def test_sendrecv_swaps():
    received = dma.sendrecv({0: [1], 1: [2]}, {0: 1, 1: 0})
    assert received[0].tolist() == [2] and received[1].tolist() == [1]


# registers and collectives


def test_registers_and_loops():
    assert registers.register_load([[7]], "int32") == 7
    assert registers.register_store(300, "uint8") == 255
    seen: list[int] = []
    registers.fori_loop(0, 5, seen.append, step=2)
    registers.while_loop(2, lambda value: seen.append(value) or value - 1)
    assert seen == [0, 2, 4, 2, 1]


def test_collectives_by_hand():
    x = [np.array([[float(r)], [10.0 + r]]) for r in range(2)]
    assert collectives.all_reduce(x, "add")[1].tolist() == [[1], [21]]
    assert collectives.all_gather(x, 0)[0][:, 0].tolist() == [0, 10, 1, 11]
    assert [part.item() for part in collectives.reduce_scatter(x, "maximum")] == [1, 11]
    assert [part[:, 0].tolist() for part in collectives.all_to_all(x)] == [[0, 1], [10, 11]]
    assert [v.tolist() for v in collectives.collective_permute_implicit([[1], [2], [3]])] == [[3], [1], [2]]
    assert [v.item() for v in collectives.collective_permute_implicit_reduce([[1], [2]], [[5], [0]], "add")] == [2, 6]
    assert collectives.collective_permute([[1], [2]], [[0], [0]], [(0, 1)])[1].tolist() == [1]
    assert [collectives.processing_rank([4, 5, 6], 5, step) for step in range(3)] == [5, 4, 6]


def test_variable_length_collectives_by_hand():
    srcs = [np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])]
    dsts = [np.zeros(6, int)] * 2
    gathered, counts = collectives.all_gather_v(srcs, dsts, [2, 1], [1, 3])
    assert gathered[0].tolist() == [2, 3, 0, 8, 0, 0] and counts[1].tolist() == [2, 1]
    moved, counts = collectives.all_to_all_v(srcs, dsts, [[1, 2], [0, 3]], [[0, 1], [0, 1]])
    assert moved[0].tolist() == [1, 0, 0, 0, 0, 0] and counts[0].tolist() == [1, 0]
    assert moved[1].tolist() == [2, 3, 0, 6, 7, 8]
    moved, _ = collectives.all_to_all_v(srcs, dsts, [[1, 2], [0, 3]], [[0, 1], [0, 1]], [[0, 0], [4, 0]])
    assert moved[1].tolist() == [6, 7, 8, 0, 2, 3]
