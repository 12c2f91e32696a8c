"""Without quantisation: layouts, dtypes, cores and sizes around every tile, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.kernels import output_projection_cte as kernel_module
from tests.output_projection_nki.case import BFLOAT16, FLOAT16, FLOAT32, BNdS, BNSd, BSNd, Case


@pytest.mark.parametrize("layout", [None, BNdS, BSNd, BNSd])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_layouts_dtypes_cores(layout, dtype, lnc, bias):
    Case((2, 3, 80, 150, 300), layout=layout, dtype=dtype, bias=bias).check(lnc=lnc)


@pytest.mark.parametrize("layout", [BNdS, BSNd, BNSd])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 2),
        (1, 1, 128, 128, 512),
        (1, 2, 64, 129, 514),  # two heads to a tile of the contraction
        (1, 17, 128, 127, 130),
        (1, 5, 72, 300, 258),  # heads that straddle tiles
        (3, 4, 32, 50, 640),  # tiles of tokens that straddle sequences
        (130, 1, 16, 1, 66),
        (1, 2, 128, 1100, 96),  # two chunks of tokens
        (2, 1, 96, 600, 2050),  # and two stores per token
    ],
)
def test_sizes(layout, shape):
    Case(shape, layout=layout, bias=True, seed=sum(shape)).check(lnc=2)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("output_dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_output_dtype(target, output_dtype):
    Case((1, 2, 128, 100, 200), output_dtype=output_dtype, bias=True).check(target)


@pytest.mark.parametrize("layout", [BNdS, BSNd])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("chunks", [False, True])
def test_weights_that_do_not_stay(monkeypatch, layout, dtype, chunks):
    """Blocks of columns come and go, and with several chunks all tokens pass again."""
    monkeypatch.setattr(kernel_module, "BLOCK_BYTES", 4000)
    if chunks:
        monkeypatch.setattr(kernel_module, "ROWS_PER_CHUNK", 128)
    Case((1, 2, 128, 300, 2100), layout=layout, dtype=dtype, bias=True).check(lnc=2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", [BNdS, BNSd])
def test_any_order_of_the_cores(seed, layout):
    """The cores never meet: no order of their instructions is a race, and none changes a bit."""
    case = Case((2, 2, 80, 70, 700), layout=layout, bias=True)
    assert torch.equal(case.run(lnc=2, seed=seed), case.run(lnc=2))


def test_the_cores_share_the_columns():
    case = Case((1, 4, 64, 200, 1300), bias=True)
    assert torch.equal(case.run(lnc=1), case.run(lnc=2))


@pytest.mark.parametrize("layout", [BNdS, BSNd, BNSd])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_nan_infinity_and_the_largest_values_stay_with_their_token(layout, dtype):
    def change(x):
        x[0, 3, 5] = torch.nan
        x[0, 7, 0] = torch.inf
        x[0, 11, 2] = torch.finfo(dtype).max
        x[0, 12, 2] = -torch.finfo(dtype).max

    case = Case((1, 2, 64, 140, 130), layout=layout, dtype=dtype, change=change)
    got = case.run(lnc=2)
    case.compare(got, [row for row in range(140) if row != 7])
    assert (got[0, 7].isinf()).all()
    assert got[0, [11, 12]].isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("layout", [BNdS, BSNd, BNSd])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("heads", [1, 2, 7, 16])
@pytest.mark.parametrize("depth", [40, 64, 80, 96, 128])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 43), (1, 513), (2, 1500)])
def test_all_sizes(layout, dtype, lnc, heads, depth, batch, length):
    Case((batch, heads, depth, length, 1026), layout=layout, dtype=dtype, bias=True).check(lnc=lnc)
