"""Conversions between dtypes against ml_dtypes, and the storage of each dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from nki_parallel_attn.sim import dtypes as dt
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim import simulate

ML_DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
EDGES = [0.0, -0.0, 240, 247.99, 248, 256, 448, 463.9, 464, 464.1, 480, 57344, 61439, 61440, 65519, 65520, 3.4e38]


def samples() -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    edges = np.float32([*EDGES, np.inf, np.nan])
    return np.concatenate([bits.view(np.float32), edges, -edges, np.exp2(np.arange(-149, 128, dtype=np.float32))])


@pytest.mark.parametrize("name", ML_DTYPES)
def test_float_encoding_is_that_of_ml_dtypes(name):
    values = samples()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(ML_DTYPES[name]).astype(np.float32)
    format = getattr(dt, name).precise
    got = format.decode(format.encode(torch.from_numpy(values))).numpy()
    np.testing.assert_array_equal(got, expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(expected[finite]))


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_every_bit_pattern_decodes_as_in_ml_dtypes(name):
    bits = np.arange(256, dtype=np.uint8)
    format = getattr(dt, name).precise
    got = format.decode(torch.from_numpy(bits).view(format.torch)).numpy()
    np.testing.assert_array_equal(got, bits.view(getattr(ml_dtypes, name)).astype(np.float32))


def test_tfloat32_rounds_to_ten_mantissa_bits():
    encode = dt.tfloat32.precise.encode
    ulp = 2.0**-10
    values = torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.51 * ulp, -1 - ulp, float("inf"), float("nan")])
    assert torch.equal(encode(values)[:5], torch.tensor([1, 1 + 2 * ulp, 1 + ulp, -1 - ulp, float("inf")]))
    assert bool(encode(values)[5].isnan())


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_float_to_integer_rounds_to_even_and_saturates(name):
    dtype = getattr(dt, name)
    info = torch.iinfo(dtype.precise.torch)
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 1e30, -1e30, float("inf"), float("nan"), 100.7])
    got = dtype.precise.encode(values).to(torch.int64).tolist()
    low = info.min
    assert got == [0, 2, 2, 0, max(-2, low), info.max, low, info.max, 0, 101]


def test_names_and_foreign_dtypes():
    assert nl.float32 == "float32" and str(nl.bfloat16) == "bfloat16" and repr(nl.int8) == "nl.int8"
    assert dt.as_dtype(np.float16) is nl.float16 and dt.as_dtype(torch.bfloat16) is nl.bfloat16
    assert dt.as_dtype(ml_dtypes.float8_e4m3) is nl.float8_e4m3 and dt.as_dtype("uint8") is nl.uint8
    with pytest.raises(TypeError):
        dt.as_dtype(np.float64)


CASTS = ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8", "uint8", "int16", "int32", "uint32"]


@pytest.mark.parametrize("source", CASTS)
@pytest.mark.parametrize("destination", CASTS)
def test_dma_casts_through_float32(source, destination):
    start, end = getattr(dt, source).precise, getattr(dt, destination).precise
    values = torch.linspace(-200, 200, 256).reshape(4, 64)

    def kernel(x):
        first = nl.ndarray((4, 64), getattr(nl, source))
        nisa.dma_copy(dst=first, src=x)
        second = nl.ndarray((4, 64), getattr(nl, destination))
        nisa.dma_copy(dst=second, src=first)
        out = nl.ndarray((4, 64), nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=second)
        return out

    expected = end.decode(end.encode(start.decode(start.encode(values))))
    torch.testing.assert_close(simulate(kernel)(values), expected, rtol=0, atol=0, equal_nan=True)


def test_wide_mode_keeps_float32():
    values = torch.randn(4, 64)

    def kernel(x):
        tile = nl.load(x, dtype=nl.bfloat16)
        out = nl.ndarray((4, 64), nl.float32, nl.shared_hbm)
        nl.store(out, tile)
        return out

    assert torch.equal(simulate(kernel, precise=False)(values), values)
    assert torch.equal(simulate(kernel)(values), values.bfloat16().float())


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float32", "int32", "uint16", "bool"])
def test_arguments_return_as_the_same_kind_and_are_written_in_place(name, precise):
    values = torch.arange(8).reshape(1, 8) % 2

    def kernel(x):
        tile = nl.load(x)
        nisa.dma_copy(dst=x[:, 0:1], src=tile[:, 1:2])
        return x

    torch_input = values.to(getattr(torch, name))
    expected = torch_input.clone()
    expected[:, 0] = expected[:, 1]
    result = simulate(kernel, precise=precise)(torch_input)
    assert result is torch_input and torch.equal(result.float(), expected.float())
    if name != "bool":
        array = values.numpy().astype(ML_DTYPES.get(name, name))
        result = simulate(kernel, precise=precise)(array)
        assert result is array and np.array_equal(array.astype(np.float32), expected.float().numpy())
