"""What the cost model says of the kernel, which also counts what it keeps in SBUF and PSUM."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.kernels.attention_const_max import attention_const_max
from nki_parallel_attn.sim import profile
from tests.const_max.case import HEAD, HEAD_DIM, SEQ, in_layout

PEAK_FLOPS_PER_NS = 79e3


def modelled(queries, keys, layout=HEAD, target="trn2", lnc=1):
    q, k, v = (torch.empty(1, n, HEAD_DIM, dtype=torch.bfloat16, device="meta") for n in (queries, keys, keys))
    return profile(attention_const_max, lnc=lnc, target=target)(
        in_layout(q, layout), in_layout(k, layout), v, 4.0, None, layout, layout
    )


@pytest.mark.parametrize(("target", "layout"), [("trn2", HEAD), ("trn2", SEQ), ("trn3", HEAD)])
def test_near_the_peak_of_the_tensor_engine(target, layout):
    """Two matmuls per tile at 79 TFLOP/s, and nothing else in the way: 0.97 as modelled."""
    report = modelled(8192, 8192, layout, target)
    assert 4 * 8192 * 8192 * HEAD_DIM / (PEAK_FLOPS_PER_NS * report.makespan_ns) > 0.95
    assert report.core().hbm_read_bytes == 3 * 8192 * HEAD_DIM * 2, "each operand is read once"
    assert report.core().hbm_written_bytes == 8192 * HEAD_DIM * 2


def test_two_cores_take_half_the_time():
    one, two = (modelled(2048, 4096, lnc=lnc).makespan_ns for lnc in (1, 2))
    assert two < 0.6 * one, "half, and the time to start and to finish"


def test_sbuf_does_not_grow_with_the_keys():
    """Sections of keys come and go, so 131072 keys take no more SBUF than a few sections."""
    peaks = [modelled(128, keys).core().sbuf_peak_bytes for keys in (32768, 131072)]
    assert peaks[0] == peaks[1]
