"""STATIC, ROW and MX against the oracle, which rounds from the formats' own lists of values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nki_parallel_attn import output_projection_cte
from nki_parallel_attn.kernels import output_projection_cte as kernel_module
from nki_parallel_attn.topology.types import DtypeMode
from tests.output_projection_nki.case import BFLOAT16, FLOAT16, FLOAT32, MX, ROW, STATIC, Case

SHAPES = [
    (2, 3, 80, 150, 300),
    (1, 1, 64, 5, 514),
    (1, 4, 128, 129, 96),  # whole tiles only, in pairs
    (1, 3, 128, 200, 130),  # one without a pair
    (1, 5, 104, 140, 64),  # and the last one cut
]


@pytest.mark.parametrize("kind", [STATIC, ROW])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_float8(kind, shape, lnc, bias):
    Case(shape, kind, bias=bias, output_dtype=FLOAT32, seed=sum(shape)).check(lnc=lnc)


@pytest.mark.parametrize("kind", [STATIC, ROW])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("ocp", [False, True])
def test_float8_of_240_and_of_448(kind, dtype, ocp):
    Case((1, 3, 96, 140, 200), kind, dtype=dtype, ocp=ocp, bias=True).check(lnc=2)


@pytest.mark.parametrize(("target", "same_as"), [("trn2", DtypeMode.NON_OCP), ("trn3", DtypeMode.OCP)])
@pytest.mark.parametrize("kind", [STATIC, ROW])
def test_auto_follows_the_target(kind, target, same_as):
    case = Case((1, 2, 64, 30, 40), kind, output_dtype=FLOAT32)
    auto, other = (case.run(target, dtype_mode=mode) for mode in (DtypeMode.AUTO, same_as))
    assert torch.equal(auto, other)


@pytest.mark.parametrize("rows", [1, 128])
def test_row_scales_of_one_row_or_of_equal_ones(rows):
    case = Case((1, 2, 64, 30, 40), ROW)
    scales = case.arguments["weight_scales"].expand(rows, -1).contiguous()
    case.compare(case.run(weight_scales=scales))


@pytest.mark.parametrize("elements", ["e4m3fn", "e5m2", "float4"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_mx(elements, compact, lnc, bias):
    # 640 rows: a whole tile of 512 and one of 128. 384 columns: a core's half starts inside a block of 128.
    Case((1, 5, 128, 131, 384), MX, elements=elements, compact=compact, bias=bias).check(lnc=lnc)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("shape", [(1, 1, 128, 1, 2), (2, 8, 64, 300, 130), (3, 4, 96, 43, 128), (1, 6, 64, 1030, 64)])
def test_mx_sizes(dtype, shape):
    Case(shape, MX, dtype=dtype, output_dtype=FLOAT32, seed=sum(shape)).check(lnc=2)


@pytest.mark.parametrize("kind", [STATIC, ROW, MX])
def test_weights_that_do_not_stay(monkeypatch, kind):
    monkeypatch.setattr(kernel_module, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(kernel_module, "ROWS_PER_CHUNK", 128)
    Case((1, 4, 128, 200, 1536), kind, bias=True, compact=kind is MX).check(lnc=2)


@pytest.mark.parametrize("kind", [STATIC, ROW, MX])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_the_cores(kind, seed):
    case = Case((2, 2, 128, 70, 256), kind, bias=True)
    assert torch.equal(case.run(lnc=2, seed=seed), case.run(lnc=2))


def some_zeros(x):
    x[0, 0] = 0
    x[0, 1, :64] = 0
    x[0, 2] = -0.0


@pytest.mark.parametrize("kind", [STATIC, ROW, MX])
def test_zeros(kind):
    """Rows and blocks of zeros have a scale like any other, and give the bias alone."""
    case = Case((1, 2, 128, 20, 64), kind, change=some_zeros, bias=True, output_dtype=FLOAT32)
    case.check()
    got = case.run()[0]
    assert torch.equal(got[0], case.arguments["bias"][0].float())
    assert torch.equal(got[2], got[0])


def extremes(x):
    x[0, 0, 0] = torch.finfo(x.dtype).max
    x[0, 1, 1] = -torch.finfo(x.dtype).max
    x[0, 2] = torch.finfo(x.dtype).tiny
    x[0, 3, 2] = 7.5  # 250 units of 0.03
    x[0, 4, 2] = -60000.0


@pytest.mark.parametrize(
    ("kind", "dtype"), [*itertools.product((STATIC, ROW, MX), (BFLOAT16, FLOAT16)), (STATIC, FLOAT32), (ROW, FLOAT32)]
)
@pytest.mark.parametrize("backend", ["sim", "torch"])
def test_largest_and_smallest_values(kind, dtype, backend):
    case = Case((1, 2, 128, 20, 64), kind, dtype=dtype, change=extremes, output_dtype=FLOAT32)
    target = "trn3" if kind is MX else "trn2"
    case.compare(output_projection_cte(**case.arguments, backend=backend, target=target))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", ["sim", "torch"])
@pytest.mark.parametrize("power", [-110, -118, -126, -134])
def test_rows_whose_results_are_hardly_normal_numbers(power, backend, bias):
    """The product of a row's and a column's scale is subnormal from the second one on."""

    def change(x):
        x *= 2.0**power

    case = Case((1, 2, 128, 20, 1300), ROW, dtype=FLOAT32, change=change, bias=bias)
    if bias:
        case.arguments["bias"].zero_()
        case.bias_values = case.arguments["bias"].double().numpy()
    case.compare(output_projection_cte(**case.arguments, backend=backend))


@pytest.mark.parametrize("kind", [STATIC, ROW, MX])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_with_their_token(kind, value):
    """STATIC clamps infinity, as its definition does. ROW and MX have no scale for it: NaN, for that token alone."""

    def change(x):
        x[0, 3, 5] = value

    with np.errstate(invalid="ignore"):
        case = Case((1, 2, 128, 140, 64), kind, change=change, output_dtype=FLOAT32)
    got = case.run()
    case.compare(got, [row for row in range(140) if row != 3])
    if kind is STATIC and value == value:
        case.compare(got, [3])
    else:
        assert got[0, 3].isnan().all()


def test_mx_scale_bytes_at_both_ends():
    """2^-127 and 2^127 are ordinary factors; 255 is NaN, and its columns are NaN."""
    case = Case((1, 1, 128, 10, 8), MX, elements="float4", output_dtype=FLOAT32)
    scales = case.arguments["weight_scales"]
    scales[:, 0] = 0
    scales[0, 1] = 255
    scales[:, 2] = 240
    got = case.run()[0].double().numpy()
    assert np.isnan(got[:, 1]).all()
    assert np.isfinite(np.delete(got, 1, 1)).all()
    assert np.abs(got[:, 0]).max() < 2.0**-110
    assert np.abs(got[:, 2]).min() > 2.0**100


@pytest.mark.long
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    ("kind", "heads", "depth"),
    # MX contracts whole blocks of 128.
    [
        sizes
        for sizes in itertools.product([STATIC, ROW, MX], [1, 2, 8, 17], [64, 80, 128])
        if sizes[0] is not MX or sizes[1] * sizes[2] % 128 == 0
    ],
)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 43), (1, 513), (2, 1500)])
def test_all_sizes(kind, dtype, lnc, heads, depth, batch, length):
    Case((batch, heads, depth, length, 1026), kind, dtype=dtype, bias=True).check(lnc=lnc)
