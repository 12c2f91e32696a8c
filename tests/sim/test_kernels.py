"""Whole kernels in the documented style, on one core, on two, and in a world."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.sim import simulate

from .kernels.flash_attention import flash_attention
from .kernels.matmul import tiled_matmul


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("lnc", [1, 2])
def test_tiled_matmul(target, lnc):
    lhs_t, rhs = torch.randn(256, 256), torch.randn(256, 1024)
    expected = lhs_t.double().T @ rhs.double()
    got = simulate(tiled_matmul[lnc], target=target)(lhs_t, rhs)
    # float32 sums of 256 products of values of size 1.
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=256 * 2.0**-23)


def test_tiled_matmul_in_bfloat16_rounds_once():
    lhs_t, rhs = torch.randn(256, 128).bfloat16(), torch.randn(256, 512).bfloat16()
    expected = lhs_t.float().T @ rhs.float()
    got = simulate(tiled_matmul, target="trn2")(lhs_t, rhs)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize("d", [64, 128])
def test_flash_attention_against_float64(d):
    heads, seqlen = 2, 1024
    q, k, v = (torch.randn(heads, seqlen, d) for _ in range(3))
    scores = q.double() @ k.double().transpose(1, 2) / d**0.5
    scores.masked_fill_(torch.ones(seqlen, seqlen).triu(1).bool(), float("-inf"))
    expected = scores.softmax(-1) @ v.double()
    run = simulate(flash_attention, world_size=2, target="trn2")
    arguments = (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v)
    for got in run([arguments, arguments]):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
