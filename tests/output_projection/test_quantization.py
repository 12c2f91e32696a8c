"""float8 by tensor and by row: every code, ties, clamps, and rows of zeros, against the format's definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn import DtypeMode
from nki_parallel_attn.kernels.quantization_torch import (
    FP8,
    exceeds,
    fp8_max,
    quantize_rows,
    quantize_static,
    to_fp8,
)

from . import oracle

FORMATS = {240.0: oracle.E4M3, 448.0: oracle.E4M3FN}


@pytest.mark.parametrize(
    ("mode", "target", "maximum"),
    [
        (DtypeMode.NON_OCP, "trn2", 240.0),
        (DtypeMode.NON_OCP, "trn3", 240.0),
        (DtypeMode.OCP, "trn3", 448.0),
        (DtypeMode.AUTO, "trn2", 240.0),
        (DtypeMode.AUTO, "trn3", 448.0),
    ],
)
def test_which_float8(mode, target, maximum):
    assert fp8_max(mode, target) == maximum


@pytest.mark.parametrize("maximum", FORMATS)
def test_every_finite_code_is_kept_bit_for_bit(maximum):
    values = FORMATS[maximum].values()
    finite = np.flatnonzero(np.isfinite(values))
    got = to_fp8(torch.from_numpy(values[finite]).float(), maximum)
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), finite.astype(np.uint8))


@pytest.mark.parametrize("maximum", FORMATS)
def test_rounding_around_every_code_and_beyond_the_largest(maximum):
    grid = FORMATS[maximum].values()[:128]
    grid = grid[np.isfinite(grid)]
    middles = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate((middles, np.nextafter(middles.astype(np.float32), np.float32(np.inf)), middles * (1 - 2**-20)))
    x = np.concatenate((x, [maximum * (1 + 2**-20), 1e30, 2.0**-149])).astype(np.float32)
    x = np.concatenate((x, -x))
    got = to_fp8(torch.from_numpy(x), maximum).to(torch.float64).numpy()
    expected = oracle.saturated(x.astype(np.float64), FORMATS[maximum])
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("maximum", FORMATS)
def test_infinity_saturates_and_nan_stays(maximum):
    got = to_fp8(torch.tensor([np.inf, -np.inf, np.nan]), maximum).float()
    assert got[:2].tolist() == [maximum, -maximum]
    assert got[2].isnan()


numbers = st.integers(0, 2**31)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.sampled_from((240.0, 448.0)),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(-40, 15),
    numbers,
)
def test_rows(dtype, maximum, rows, width, power, seed):
    largest = torch.finfo(dtype).max  # beyond it float16 has infinity, which is a case of its own below
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).mul(2.0**power)
    x = x.clamp(-largest, largest).to(dtype)
    x[0] = 0
    elements, scale = quantize_rows(x, maximum)
    expected, expected_scale = oracle.quantized_rows(x.double().numpy(), FORMATS[maximum])
    assert elements.dtype == FP8 and scale.dtype == torch.float32
    np.testing.assert_array_equal(scale.double().numpy(), expected_scale)
    np.testing.assert_array_equal(elements.double().numpy(), expected)


def test_rows_at_the_ends_of_float32_and_rows_that_are_not_finite():
    x = torch.tensor([[3e38, -1.0], [2.0**-149, 0.0], [0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0], [1.0, 2.0]])
    elements, scale = quantize_rows(x, 240.0)
    assert elements[:3].float().tolist() == [[240.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert elements[3].float().isnan().all()
    assert elements[4, 0].float().isnan()
    assert elements[5].float().tolist() == [120.0, 240.0]
    assert scale[:3].isfinite().all() and (scale[1:3] == 2.0**-126).all()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from((torch.float32, torch.bfloat16)), st.sampled_from((240.0, 448.0)), st.floats(1e-3, 1e3), numbers)
def test_static(dtype, maximum, scale, seed):
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(seed)).mul(200).to(dtype)
    given_scale = torch.full((128, 1), scale)[:1]
    got = quantize_static(x, given_scale, maximum).double().numpy()
    expected = oracle.quantized_static(x.double().numpy(), float(given_scale), FORMATS[maximum])
    np.testing.assert_array_equal(got, expected)


def test_codes_that_float8_e4m3_reads_otherwise():
    codes = torch.arange(256, dtype=torch.uint8)
    wrong = [code for code in range(256) if exceeds(codes[code : code + 1].view(FP8), 240.0)]
    differ = (oracle.E4M3.values() != oracle.E4M3FN.values()) & ~np.isnan(oracle.E4M3FN.values())
    assert wrong == np.flatnonzero(differ).tolist()
    assert not exceeds(codes.view(FP8), 448.0)
