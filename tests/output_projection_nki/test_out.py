"""`out`: a slice of the caller's tensor is written, nothing else, and that tensor comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.output_projection_nki.case import BFLOAT16, FLOAT32, BNdS, BNSd, BSNd, Case

SENTINEL = 0x7FC1  # a NaN that nothing computes


def sentinels(*shape):
    return torch.full(shape, SENTINEL, dtype=torch.int16).view(BFLOAT16)


@pytest.mark.parametrize("layout", [BNdS, BSNd, BNSd])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("offset", "total"), [(0, 150), (0, 170), (13, 163), (40, 300)])
def test_a_slice(layout, lnc, offset, total):
    case = Case((2, 3, 64, 150, 200), layout=layout, bias=True)
    out = sentinels(2, total, 200)
    got = case.run(lnc=lnc, out=out, out_s_offset=offset)
    assert got is out
    case.compare(out[:, offset : offset + 150])
    rest = torch.cat((out[:, :offset], out[:, offset + 150 :]), 1)
    assert (rest.view(torch.int16) == SENTINEL).all()


def test_chunks_of_a_prefill_need_no_stitching():
    cases = [Case((2, 2, 128, length, 96), seed=length) for length in (100, 60, 140)]
    out = sentinels(2, 300, 96)
    offset = 0
    for case in cases:
        case.run(lnc=2, out=out, out_s_offset=offset)
        offset += case.shape[3]
    offset = 0
    for case in cases:
        case.compare(out[:, offset : offset + case.shape[3]])
        offset += case.shape[3]


def test_out_of_another_dtype_and_layout_in_memory():
    case = Case((1, 2, 64, 50, 80), output_dtype=FLOAT32)
    memory = torch.full((60, 1, 2 * 80), 7.0)
    out = memory.transpose(0, 1)[:, :, ::2]
    assert case.run(out=out, out_s_offset=4) is out
    case.compare(out[:, 4:54])
    untouched = torch.cat((memory[:4, :, ::2], memory[54:, :, ::2]))
    assert np.all(untouched.numpy() == 7)
    assert np.all(memory[:, :, 1::2].numpy() == 7)
