"""What the cost model says of the kernel, which also counts what it keeps in SBUF and PSUM and moves by DMA."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.kernels.output_projection_cte import output_projection_cte
from nki_parallel_attn.sim import profile
from tests.output_projection_nki.case import BFLOAT16, FLOAT32, MX, NONE, ROW, STATIC, BNdS, BNSd, BSNd

PEAK_FLOPS_PER_NS = 79e3
FLOAT8 = torch.float8_e4m3fn


def modelled(shape, kind=NONE, layout=None, dtype=BFLOAT16, lnc=2, bias=False):
    """Report for B, N, D, S, H."""

    def empty(*dims, dtype=dtype):
        return torch.empty(*dims, dtype=dtype, device="meta")

    batch, heads, depth, length, hidden = shape
    contraction = heads * depth
    layout = layout or (BSNd if kind is ROW else BNdS)
    dims = {BNdS: (heads, depth, length), BSNd: (length, heads, depth), BNSd: (heads, length, depth)}[layout]
    weight, scales = empty(contraction, hidden, dtype=dtype if kind is NONE else FLOAT8), {}
    if kind is MX:
        weight = empty(contraction // 4, hidden, 4, dtype=FLOAT8)
        scales["weight_scales"] = empty(contraction // 32, hidden, dtype=torch.uint8)
    elif kind is not NONE:
        scales["weight_scales"] = empty(1, hidden, dtype=FLOAT32) if kind is ROW else empty(128, 1, dtype=FLOAT32)
    if kind is STATIC:
        scales["input_scales"] = empty(128, 1, dtype=FLOAT32)
    kernel = profile(output_projection_cte, lnc=lnc, target="trn3" if kind is MX else "trn2")
    return kernel(
        empty(batch, *dims), weight, empty(1, hidden) if bias else None, kind, attention_layout=layout, **scales
    )


def of_peak(report, shape, lnc=2):
    batch, heads, depth, length, hidden = shape
    flops = 2 * batch * length * heads * depth * hidden / lnc
    return flops / (PEAK_FLOPS_PER_NS * report.makespan_ns)


@pytest.mark.parametrize("layout", [BNdS, BSNd, BNSd])
@pytest.mark.parametrize("bias", [False, True])
def test_near_the_peak_of_the_tensor_engine(layout, bias):
    """0.96 to 0.97 as modelled; 0.995 is the Tensor Engine without a pause."""
    shape = (1, 8, 128, 8192, 8192)
    report = modelled(shape, layout=layout, bias=bias)
    assert of_peak(report, shape) > 0.95
    per_core = report.core().hbm_read_bytes
    biases = 4 * 4096 * 2 if bias else 0  # a row for each quadrant
    assert per_core == 1024 * 8192 * 2 + 1024 * 4096 * 2 + biases, "attention and the core's weights, read once"
    assert report.core().hbm_written_bytes == 8192 * 4096 * 2


@pytest.mark.parametrize(("kind", "least"), [(STATIC, 1.8), (ROW, 1.6), (MX, 3.4)])
def test_low_precision_is_faster(kind, least):
    """float8 contracts two rows at once and MX four: 1.87, 1.68 and 3.68 of the 16-bit peak as modelled."""
    shape = (1, 8, 128, 8192, 8192)
    assert of_peak(modelled(shape, kind), shape) > least


@pytest.mark.parametrize("depth", [64, 80, 96])
def test_heads_fill_the_partitions(depth):
    """As many matmuls as N * D asks for, not as N does."""
    shape = (1, 16, depth, 2048, 4096)
    report = modelled(shape)
    assert of_peak(report, shape) > 0.85


@pytest.mark.parametrize(
    ("kind", "layout", "dtype", "hidden"),
    [
        (NONE, BNdS, BFLOAT16, 32768),
        (NONE, BNSd, BFLOAT16, 16384),
        (NONE, BSNd, FLOAT32, 16384),
        (STATIC, None, BFLOAT16, 16384),
        (ROW, None, BFLOAT16, 16384),
        (MX, None, BFLOAT16, 16384),
    ],
)
def test_large_sizes_fit(kind, layout, dtype, hidden):
    """17 heads of 128: two chunks of tokens and several blocks of columns, so more of either take no more."""
    report = modelled((1, 17, 128, 1664, hidden), kind, layout, dtype, bias=True)
    assert report.core().sbuf_peak_bytes < 0.9 * report.sbuf_capacity
    assert report.core().psum_peak_bytes <= report.psum_capacity


@pytest.mark.parametrize("shape", [(1, 1, 128, 1024, 32768), (1, 8, 128, 1024, 8192), (1, 32, 128, 384, 4096)])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_other_sizes_fit(shape, dtype):
    report = modelled(shape, dtype=dtype, lnc=1, bias=True)
    assert report.core().sbuf_peak_bytes < 0.95 * report.sbuf_capacity


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 17, 128, 131072, 1024), (64, 17, 128, 2048, 1294), (4, 17, 128, 2048, 32768)])
def test_many_tokens(shape):
    report = modelled(shape, bias=True)
    assert of_peak(report, shape) > 0.97
    assert report.core().sbuf_peak_bytes < 0.9 * report.sbuf_capacity
