"""Microscaling: quantisation and matmul against their float64 evaluation, bit for bit where float32 is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nki_parallel_attn.sim import NkiValidationError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import dtypes, tensor, vector
from .tiles import cases, close, load, run, seeds

FLOAT8 = st.sampled_from(("float8_e4m3fn", "float8_e5m2"))
ELEMENTS = st.sampled_from(("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"))
PARTITIONS = st.sampled_from((32, 64, 96, 128))
STARTS = st.sampled_from((0, 4, 8, 12))
SCALES = st.sampled_from(("uint8", "float8_e8m0fnu"))


def packed(dtype):
    return getattr(nl, f"{dtype}_x4")


def codes(seed, shape, dtype):
    """Random element codes [P, F, 4] that are finite, their values, and the words they are packed into [P, F]."""
    finite = np.flatnonzero(np.isfinite(dtypes.all_values(dtype)))
    chosen = np.random.default_rng(seed).choice(finite, (*shape, 4))
    bits = 4 if dtype == "float4_e2m1fn" else 8
    words = sum(chosen[..., q].astype(np.uint64) << np.uint64(bits * q) for q in range(4))
    return dtypes.all_values(dtype)[chosen], words.astype(np.uint16 if bits == 4 else np.uint32)


def unpacked(words, dtype):
    """Values [P, F, 4] of packed words."""
    bits = 4 if dtype == "float4_e2m1fn" else 8
    chosen = np.asarray(words, np.uint64)[..., None] >> (np.arange(4, dtype=np.uint64) * np.uint64(bits))
    return dtypes.all_values(dtype)[(chosen & np.uint64(2**bits - 1)).astype(int)]


def words_of(tile):
    """A packed tile copied to HBM as integer words."""
    kind = nl.uint16 if tile.dtype == nl.float4_e2m1fn_x4 else nl.uint32
    out = nl.ndarray(tile.shape, kind, nl.shared_hbm)
    nisa.dma_copy(out, tile.view(kind))
    return out


def scale_tile(shape, dtype, start):
    """A tile for scales that begin at partition `start` of a quadrant."""
    rows = shape[0] if shape[0] > 32 else 4
    whole = nl.ndarray((rows + start if rows == 4 else rows, shape[1]), getattr(nl, dtype))
    return whole[start:]


@given(
    st.sampled_from(("bfloat16", "float16")),
    FLOAT8,
    PARTITIONS,
    st.integers(1, 20),
    STARTS,
    SCALES,
    st.booleans(),
    seeds,
)
@cases
def test_quantize_mx(source, element, partitions, columns, start, scale_dtype, extreme, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((partitions, columns, 4))
    spread = 24 if source == "float16" else 130 if extreme else 20
    x *= np.repeat(2.0 ** rng.integers(-spread, spread // 2, (partitions // 8, columns, 1)), 8, axis=0)
    x[:8, 0] = 0
    x = dtypes.round_to(np.clip(x, -6e4, 6e4), source).reshape(partitions, -1)

    def kernel(a):
        src = nl.ndarray(a.shape, getattr(nl, source))
        nisa.dma_copy(src, a)
        dst = nl.ndarray((partitions, columns), packed(element))
        scale = scale_tile((partitions, columns), scale_dtype, start)
        nisa.quantize_mx(dst, src, scale)
        scales = nl.ndarray((partitions // 8, columns), nl.uint8, nl.shared_hbm)
        for q in range(partitions // 32):
            rows = slice(32 * q, 32 * q + 4)
            nisa.dma_copy(scales[4 * q : 4 * q + 4], scale[rows].view(nl.uint8))
        return words_of(dst), scales

    words, scales = simulate(kernel)(x.astype(np.float32))
    values, expected_scales = vector.quantize_mx(x, element)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(unpacked(words, element).reshape(partitions, -1), values)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2"])
def test_nan_and_infinity_stay_what_they_are(element):
    x = np.ones((32, 4), np.float32)
    x[0, 0], x[1, 1] = np.nan, -np.inf

    def kernel(a):
        dst, scale = nl.ndarray((32, 1), packed(element)), nl.ndarray((4, 1), nl.uint8)
        nisa.quantize_mx(dst, load(a, "bfloat16"), scale)
        return words_of(dst)

    values = unpacked(simulate(kernel)(x), element)[:, 0]
    assert np.isnan(values[0, 0])
    assert not np.isfinite(values[1, 1])
    assert np.isfinite(np.delete(values.reshape(-1), [0, 5])).all()


def load_words(words, dtype):
    tile = nl.ndarray(words.shape, packed(dtype))
    nisa.dma_copy(tile, words.view(packed(dtype)))
    return tile


def load_scales(dense, partitions, dtype, start):
    """Dense scales [P / 8, F] in the quadrants of a tile, from partition `start` of each."""
    scale = scale_tile((partitions, dense.shape[1]), dtype, start)
    for q in range(partitions // 32):
        nisa.dma_copy(scale[32 * q : 32 * q + 4].view(nl.uint8), dense[4 * q : 4 * q + 4])
    return scale


@given(
    ELEMENTS, ELEMENTS, PARTITIONS, st.sampled_from((2, 6, 32, 128)), st.integers(1, 40), STARTS, STARTS, SCALES, seeds
)
@cases
def test_nc_matmul_mx(left, right, partitions, m, n, left_start, right_start, scale_dtype, seed):
    rng = np.random.default_rng(seed)
    x, x_words = codes(seed, (partitions, m), left)
    y, y_words = codes(seed + 1, (partitions, n), right)
    x_scale, y_scale = (rng.integers(117, 137, (partitions // 8, width), dtype=np.uint8) for width in (m, n))

    def body(a, b, c, d):
        dst = nl.ndarray((m, n), nl.float32, nl.psum)
        operands = load_words(a, left), load_words(b, right)
        scales = (
            load_scales(c, partitions, scale_dtype, left_start),
            load_scales(d, partitions, scale_dtype, right_start),
        )
        nisa.nc_matmul_mx(dst, *operands, *scales)
        nisa.nc_matmul_mx(dst, *operands, *scales)
        return [dst]

    got = run(body, x_words, y_words, x_scale, y_scale)[0]
    exact = tensor.nc_matmul_mx(x, y, x_scale, y_scale)
    magnitude = tensor.nc_matmul_mx(abs(x), abs(y), x_scale, y_scale)
    close(got, 2 * exact, "float32", steps=4 * partitions + 1, magnitude=2 * magnitude)


@given(st.integers(0, 254), seeds)
@cases
def test_scales_at_the_ends_of_their_range_meet_in_the_middle(scale, seed):
    x, x_words = codes(seed, (32, 4), "float8_e5m2")
    y, y_words = codes(seed + 1, (32, 6), "float8_e5m2")
    x_scale, y_scale = np.full((4, 4), scale, np.uint8), np.full((4, 6), 254 - scale, np.uint8)

    def body(a, b, c, d):
        dst = nl.ndarray((4, 6), nl.float32, nl.psum)
        nisa.nc_matmul_mx(
            dst,
            load_words(a, "float8_e5m2"),
            load_words(b, "float8_e5m2"),
            load_scales(c, 32, "uint8", 0),
            load_scales(d, 32, "uint8", 0),
        )
        return [dst]

    got = run(body, x_words, y_words, x_scale, y_scale)[0]
    magnitude = tensor.nc_matmul_mx(abs(x), abs(y), x_scale, y_scale)
    close(got, tensor.nc_matmul_mx(x, y, x_scale, y_scale), "float32", steps=128, magnitude=magnitude)


def mx_kernel(dst=(8, 8), data=(64, 8), scale=(64, 8), first=0, write_scales=True, **options):
    """A matmul of zeros with these shapes; scales from partition `first` of their tile."""

    def kernel(a):
        left, right = nl.zeros(data, nl.float8_e4m3fn_x4), nl.zeros(data, nl.float8_e5m2_x4)
        scales = nl.ndarray(scale, nl.uint8)
        if write_scales:
            nisa.memset(scales, 127)
        scales = scales[first:]
        nisa.nc_matmul_mx(nl.ndarray(dst, nl.bfloat16, nl.psum), left, right, scales, scales, **options)

    return kernel


@pytest.mark.parametrize(
    ("kernel", "rule"),
    [
        (mx_kernel(), None),
        (mx_kernel(tile_position=(64, 0), tile_size=(64, 128)), None),
        (mx_kernel(tile_position=(0, 0), tile_size=(64, 64)), "tile-position"),
        (mx_kernel(tile_position=(0, 0), tile_size=(32, 128)), "tile-position"),
        (mx_kernel(data=(64, 7), scale=(64, 7), dst=(7, 7)), "stationary-limit"),
        (mx_kernel(data=(48, 8)), "mx-partition"),
        (mx_kernel(scale=(8, 8)), "mx-scale-layout"),
        (mx_kernel(scale=(64, 9)), "mx-scale-layout"),
        (mx_kernel(scale=(128, 8), first=2), "mx-scale-layout"),
        (mx_kernel(scale=(128, 8), first=4), None),
        (mx_kernel(dst=(8, 4)), "matmul-shape"),
        (mx_kernel(write_scales=False), "uninitialised-read"),
        (mx_kernel(accumulate=True), "psum-accumulate"),
    ],
)
def test_limits_of_nc_matmul_mx(kernel, rule):
    simulation = simulate(kernel, target="trn3")
    x = np.zeros((1, 1), np.float32)
    if rule is None:
        simulation(x)
        return
    with pytest.raises(NkiValidationError) as caught:
        simulation(x)
    assert caught.value.rule == rule


def test_scales_are_in_the_quadrant_of_their_data():
    def kernel(first):
        def quantize(a):
            src = nl.zeros((128, 8), nl.bfloat16)
            dst, scale = nl.ndarray((128, 2), nl.float8_e5m2_x4), nl.ndarray((128, 2), nl.uint8)
            nisa.quantize_mx(dst[32:64], src[32:64], scale[first : first + 4])

        return quantize

    x = np.zeros((1, 1), np.float32)
    simulate(kernel(40))(x)
    with pytest.raises(NkiValidationError, match="mx-scale-layout"):
        simulate(kernel(8))(x)


def test_nc_matmul_mx_needs_trn3():
    with pytest.raises(NkiValidationError) as caught:
        simulate(mx_kernel(), target="trn2")(np.zeros((1, 1), np.float32))
    assert caught.value.rule == "target"


def test_bfloat16_results_are_rounded_at_each_matmul():
    def body(a):
        data, scale = nl.ndarray((32, 2), nl.float8_e4m3fn_x4), nl.ndarray((4, 2), nl.float8_e8m0fnu)
        nisa.quantize_mx(data, load(a, "bfloat16"), scale)
        dst = nl.ndarray((2, 2), nl.bfloat16, nl.psum)
        for _ in range(5):
            nisa.nc_matmul_mx(dst, data, data, scale, scale)
        return [dst]

    # 127 ones and one 1.5: a sum of 129.25 for each result, which bfloat16 rounds to 129.
    x = np.ones((32, 8))
    x[0, [0, 4]] = 1.5
    got = run(body, x.astype(np.float32))[0]
    expected = tensor.accumulate_bfloat16([np.full((2, 2), 129.25)] * 5)
    assert (expected != dtypes.round_to(5 * 129.25, "bfloat16")).all()
    np.testing.assert_array_equal(got, expected)
