"""The public operation with backend="sim": what it takes, and how near it is to backend="torch"."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nki_parallel_attn import output_projection_cte
from nki_parallel_attn.errors import ArgumentError, NkiParallelAttnError
from tests.output_projection_nki.case import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    MX,
    NONE,
    ROW,
    STATIC,
    BNdS,
    BNSd,
    BSNd,
    Case,
)
from tests.output_projection_nki.oracle import OUTPUT_UNIT

CASES = [
    (NONE, BNdS, {}),
    (NONE, BSNd, {}),
    (NONE, BNSd, {}),
    (STATIC, None, {}),
    (STATIC, None, {"ocp": True}),
    (ROW, None, {}),
    (ROW, None, {"ocp": True}),
    (MX, None, {}),
    (MX, None, {"elements": "float4"}),
    (MX, None, {"elements": "e5m2", "compact": True}),
]


@pytest.mark.parametrize(("kind", "layout", "options"), CASES)
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("output_dtype", [None, FLOAT16, FLOAT32])
def test_both_backends(kind, layout, options, lnc, output_dtype):
    """Each is within its bound of the oracle; torch's 16-bit product may round once more, before the bias."""
    case = Case((2, 4, 96, 70, 256), kind, layout, bias=True, output_dtype=output_dtype, **options)
    target = "trn3" if kind is MX or options.get("ocp") else "trn2"
    sim = output_projection_cte(**case.arguments, backend="sim", lnc=lnc, target=target)
    twin = output_projection_cte(**case.arguments, backend="torch", lnc=lnc, target=target)
    assert sim.dtype is twin.dtype is case.out_dtype
    case.compare(sim)
    unit = OUTPUT_UNIT[str(case.out_dtype).removeprefix("torch.")]
    allowed = 2 * case.bound() + unit * np.abs(case.product.value)
    assert (np.abs((sim.double() - twin.double()).flatten(0, 1).numpy()) <= allowed).all()


@pytest.mark.parametrize("backend", ["sim", "torch"])
def test_out_is_the_tensor_that_comes_back(backend):
    case = Case((2, 2, 64, 50, 80), bias=True)
    out = torch.full((2, 90, 80), 3.0, dtype=BFLOAT16)
    assert output_projection_cte(**case.arguments, out=out, out_s_offset=20, backend=backend, lnc=2) is out
    assert (torch.cat((out[:, :20], out[:, 70:]), 1) == 3).all()
    assert (out[:, 20:70] != 3).any()


def test_views_are_taken_as_they_are():
    case = Case((2, 2, 64, 50, 80))
    arguments = case.arguments
    arguments["attention"] = arguments["attention"].transpose(1, 3).contiguous().transpose(1, 3)
    arguments["weight"] = arguments["weight"].t().contiguous().t()
    case.compare(output_projection_cte(**arguments, backend="sim", lnc=2))


def test_no_gradient():
    case = Case((1, 1, 64, 5, 8))
    case.arguments["weight"].requires_grad_()
    with pytest.raises(ArgumentError, match="no gradient"):
        output_projection_cte(**case.arguments, backend="sim")


@pytest.mark.parametrize(("kind", "layout"), [(NONE, BNdS), (NONE, BNSd), (STATIC, None), (ROW, None)])
def test_float64_is_torch_only(kind, layout):
    case = Case((1, 2, 64, 5, 8), kind, layout)
    arguments = dict(case.arguments, attention=case.arguments["attention"].double())
    if kind is NONE:
        arguments["weight"] = arguments["weight"].double()
    with pytest.raises(ArgumentError, match=r"attention: got torch\.float64"):
        output_projection_cte(**arguments, backend="sim")


def test_mx_contraction_of_whole_quadrants():
    """96 rows are three blocks of 32, which the instruction cannot take: 32 partitions hold 128 rows."""
    elements = torch.zeros(24, 8, 4, dtype=torch.float8_e4m3fn)
    scales = torch.full((3, 8), 127, dtype=torch.uint8)
    x = torch.randn(1, 1, 96, 5).to(BFLOAT16)
    with pytest.raises(NkiParallelAttnError, match="128"):
        output_projection_cte(x, elements, None, MX, weight_scales=scales, backend="sim", target="trn3")
