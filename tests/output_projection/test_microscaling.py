"""MX elements, scales and packing against their definition, and bit for bit against the simulator's instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn.kernels.microscaling_torch import (
    decode,
    dequantize_mx,
    expand_compact_scales,
    from_words,
    matmul_mx,
    pack_x4,
    quantize_mx,
    scale_values,
    unpack_x4,
    words,
)
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim import simulate

from . import oracle

E4M3FN, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
FORMATS = {E4M3FN: oracle.E4M3FN, E5M2: oracle.E5M2, E2M1: oracle.E2M1}
PACKED = {E4M3FN: "float8_e4m3fn_x4", E5M2: "float8_e5m2_x4", E2M1: "float4_e2m1fn_x4"}
elements = st.sampled_from(tuple(FORMATS))
seeds = st.integers(0, 2**31)
cases = settings(deadline=None, max_examples=25)


def finite_codes(rng, shape, dtype):
    """Random codes of finite elements, uint8."""
    values = FORMATS[dtype].values()
    return rng.choice(np.flatnonzero(np.isfinite(values)), shape).astype(np.uint8)


def as_elements(codes, dtype):
    return torch.from_numpy(codes).view(dtype)


def activations(rng, shape, dtype):
    """Normal values whose blocks differ in magnitude, with a block of zeros."""
    x = rng.standard_normal(shape) * np.repeat(2.0 ** rng.integers(-20, 8, (shape[0], shape[1] // 32)), 32, axis=1)
    x[0, :32] = 0
    return torch.from_numpy(x).to(dtype)


@cases
@given(
    st.sampled_from((torch.bfloat16, torch.float16)),
    st.sampled_from((E4M3FN, E5M2)),
    st.integers(1, 5),
    st.integers(1, 4),
    seeds,
)
def test_quantize(source, dtype, rows, blocks, seed):
    x = activations(np.random.default_rng(seed), (rows, 32 * blocks), source)
    got, scales = quantize_mx(x, dtype)
    values = x.double().numpy()
    np.testing.assert_array_equal(scales.numpy(), oracle.mx_scale_bytes(values, FORMATS[dtype]))
    dequantized = got.double().numpy() * np.repeat(2.0 ** (scales.double().numpy() - 127), 32, axis=1)
    np.testing.assert_array_equal(dequantized, oracle.mx_dequantized(values, FORMATS[dtype]))
    assert got.dtype == dtype and scales.dtype == torch.uint8


@pytest.mark.parametrize("dtype", [E4M3FN, E5M2])
def test_quantize_at_the_ends_of_bfloat16(dtype):
    top, least = torch.finfo(torch.bfloat16).max, 2.0**-133
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3], x[3, 4] = top, least, -top, 2.0**-120, 2.0**-133
    got, scales = quantize_mx(x, dtype)
    np.testing.assert_array_equal(scales.numpy(), oracle.mx_scale_bytes(x.double().numpy(), FORMATS[dtype]))
    dequantized = got.double() * 2.0 ** (scales.double() - 127)
    np.testing.assert_array_equal(dequantized.numpy(), oracle.mx_dequantized(x.double().numpy(), FORMATS[dtype]))
    assert scales[4].item() == 0
    assert got.float().isfinite().all()


@pytest.mark.parametrize("dtype", [E4M3FN, E5M2])
def test_nan_and_infinity_stay_in_their_block(dtype):
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    x[0, 0], x[1, 1] = torch.nan, -torch.inf
    got = quantize_mx(x, dtype)[0].float()
    assert got[0, 0].isnan()
    assert got[1, 1].isnan() if dtype == E4M3FN else got[1, 1] == -torch.inf
    assert (got[:, 32:] == got[0, 32]).all() and got[0, 32].isfinite()


@cases
@given(elements, st.integers(1, 9), st.integers(1, 9), seeds)
def test_packing_there_and_back(dtype, quads, columns, seed):
    codes = np.random.default_rng(seed).integers(0, 16 if dtype == E2M1 else 256, (4 * quads, columns), dtype=np.uint8)
    packed = pack_x4(as_elements(codes, dtype))
    bits = 4 if dtype == E2M1 else 8
    by_word = codes.reshape(quads, 4, columns).astype(np.uint64)
    expected = sum(by_word[:, q] << np.uint64(bits * q) for q in range(4))
    np.testing.assert_array_equal(words(packed).numpy(), expected)
    assert words(packed).data_ptr() == packed.data_ptr()
    assert torch.equal(from_words(words(packed), dtype).view(torch.uint8), packed.view(torch.uint8))
    np.testing.assert_array_equal(unpack_x4(packed).view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_value_of_every_code(dtype):
    values = FORMATS[dtype].values()
    codes = np.arange(len(values), dtype=np.uint8)[:, None]
    np.testing.assert_array_equal(decode(pack_x4(as_elements(codes, dtype))).numpy()[:, 0], values)


def test_the_value_of_every_scale():
    got = scale_values(torch.arange(256, dtype=torch.uint8)).double()
    assert got[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert got[255].isnan()


def test_compact_scales_cover_128_by_128():
    compact = torch.arange(6, dtype=torch.uint8).view(2, 3)
    dense = expand_compact_scales(compact)
    assert dense.shape == (8, 384)
    assert all(dense[k // 32, n] == compact[k // 128, n // 128] for k in range(0, 256, 31) for n in range(0, 384, 31))
    assert expand_compact_scales(compact.view(torch.float8_e8m0fnu)).dtype == torch.float8_e8m0fnu


@cases
@given(elements, st.integers(1, 4), st.integers(1, 8), st.booleans(), seeds)
def test_matmul(dtype, blocks, columns, e8m0, seed):
    rng = np.random.default_rng(seed)
    k = 32 * blocks
    x = activations(rng, (6, k), torch.bfloat16)
    codes = finite_codes(rng, (k, columns), dtype)
    scales = rng.integers(100, 140, (blocks, columns), dtype=np.uint8)
    given_scales = torch.from_numpy(scales)
    got = matmul_mx(
        x, pack_x4(as_elements(codes, dtype)), given_scales.view(torch.float8_e8m0fnu) if e8m0 else given_scales
    )
    left, right = (
        oracle.mx_dequantized(x.double().numpy(), oracle.E4M3FN),
        oracle.mx_weight(codes, scales, FORMATS[dtype]),
    )
    assert got.dtype == torch.float32
    # Products are exact; a sum of k of them in float32 is off by at most k roundings of the sum of magnitudes.
    bound = k * 2.0**-24 * (np.abs(left) @ np.abs(right))
    assert (np.abs(got.numpy() - left @ right) <= bound).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_weight_beyond_float32_times_small_activations(dtype):
    x = torch.full((1, 32), 2.0**-120, dtype=torch.bfloat16)
    largest = FORMATS[dtype].values()
    code = np.full((32, 2), np.nanargmax(np.where(np.isfinite(largest), largest, -1)), dtype=np.uint8)
    scales = np.array([[254, 255]], np.uint8)
    got = matmul_mx(x, pack_x4(as_elements(code, dtype)), torch.from_numpy(scales))
    right = oracle.mx_weight(code, scales, FORMATS[dtype])
    expected = oracle.mx_dequantized(x.double().numpy(), oracle.E4M3FN) @ right
    assert got[0, 0].item() == np.float32(expected[0, 0])
    assert got[0, 1].isnan()


@pytest.mark.parametrize("dtype", FORMATS)
def test_bit_for_bit_what_the_simulator_reads_and_writes(dtype):
    """quantize_mx on [K, T] in the interleaved layout, then nc_matmul_mx with the words of `pack_x4`."""
    rng = np.random.default_rng(3)
    k, tokens, columns = 128, 6, 8
    x = activations(rng, (tokens, k), torch.bfloat16)
    codes = finite_codes(rng, (k, columns), dtype)
    scales = rng.integers(117, 137, (k // 32, columns), dtype=np.uint8)
    packed = pack_x4(as_elements(codes, dtype))
    # SBUF holds token t's contraction rows 4p + q as the four columns of t on partition p.
    interleaved = x.view(tokens, k // 4, 4).permute(1, 0, 2).reshape(k // 4, 4 * tokens)

    def kernel(a, b, c):
        source = nl.ndarray(a.shape, nl.bfloat16)
        nisa.dma_copy(source, a)
        left = nl.ndarray((k // 4, tokens), nl.float8_e4m3fn_x4)
        left_scale = nl.ndarray((4, tokens), nl.uint8)
        nisa.quantize_mx(left, source, left_scale)
        right = nl.ndarray((k // 4, columns), getattr(nl, PACKED[dtype]))
        right_scale = nl.ndarray((4, columns), nl.uint8)
        nisa.dma_copy(right, b.view(getattr(nl, PACKED[dtype])))
        nisa.dma_copy(right_scale, c)
        sums = nl.ndarray((tokens, columns), nl.float32, nl.psum)
        nisa.nc_matmul_mx(sums, left, right, left_scale, right_scale)
        product = nl.ndarray(sums.shape, nl.float32)
        nisa.tensor_copy(product, sums)
        outputs = [
            nl.ndarray(shape, kind, nl.shared_hbm)
            for shape, kind in (((k // 4, tokens), nl.uint32), ((4, tokens), nl.uint8), (sums.shape, nl.float32))
        ]
        for out, tile in zip(outputs, (left.view(nl.uint32), left_scale, product), strict=True):
            nisa.dma_copy(out, tile)
        return tuple(outputs)

    left, left_scale, product = simulate(kernel, target="trn3")(interleaved, words(packed), torch.from_numpy(scales))
    got, got_scales = quantize_mx(x)
    np.testing.assert_array_equal(np.asarray(left), words(pack_x4(got.t())).numpy())
    np.testing.assert_array_equal(np.asarray(left_scale), got_scales.t().numpy())
    exact = oracle.mx_dequantized(x.double().numpy(), oracle.E4M3FN) @ oracle.mx_weight(codes, scales, FORMATS[dtype])
    for result in (np.asarray(product), matmul_mx(x, packed, torch.from_numpy(scales)).numpy()):
        np.testing.assert_allclose(result, exact, rtol=0, atol=k * 2.0**-24 * np.abs(exact).max() * 8)


def test_dequantize_in_float64_is_exact():
    codes = np.arange(32, dtype=np.uint8)[:, None] % 16
    got = dequantize_mx(pack_x4(as_elements(codes, E2M1)), torch.tensor([[254]], dtype=torch.uint8), torch.float64)
    np.testing.assert_array_equal(got.numpy(), oracle.mx_weight(codes, np.array([[254]], np.uint8), oracle.E2M1))
