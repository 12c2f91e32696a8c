"""softmax_max and hard_bound from QK-RMSNorm weights: the page's formulas, and what they promise."""

from __future__ import annotations

import math

import pytest
import torch

from nki_parallel_attn import attention_const_max, softmax_max_from_qk_norm
from nki_parallel_attn.errors import ArgumentError
from tests.const_max.case import HEAD_DIM


def test_unit_weights():
    """sigma = 1: 0.88 * sqrt(2 * ln(8192)) = 3.735787, sqrt(128) = 11.313708"""
    got = softmax_max_from_qk_norm(torch.ones(128), torch.ones(128), 8192)
    assert got.softmax_max == pytest.approx(3.735787, abs=1e-6)
    assert got.hard_bound == pytest.approx(11.313708, abs=1e-6)
    assert got.fits


def test_formulas_element_by_element():
    gamma_q, gamma_k = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.tensor([0.25, 1.0, -4.0, 2.0])
    got = softmax_max_from_qk_norm(gamma_q, gamma_k, 100)
    sigma = math.sqrt((0.25**2 + 2.0**2 + 2.0**2 + 6.0**2) / 4)
    assert got.softmax_max == pytest.approx(0.88 * sigma * math.sqrt(2 * math.log(100)), rel=1e-12)
    assert got.hard_bound == pytest.approx(2 * 3.0 * 4.0, rel=1e-12)


@pytest.mark.parametrize(("weight", "fits"), [(2.0, True), (2.8, True), (3.3, False), (10.0, False)])
def test_fall_back_when_the_bound_is_more_than_80_above(weight, fits):
    got = softmax_max_from_qk_norm(torch.full((128,), weight), torch.full((128,), weight), 8192)
    assert got.fits is fits
    assert (got.hard_bound - got.softmax_max <= 80) is fits


def test_one_key():
    assert softmax_max_from_qk_norm(torch.ones(8), torch.ones(8), 1).softmax_max == 0


def test_what_fits_works():
    """Random rows and one that meets the hard bound, through RMSNorm with weights just within the gap of 80."""
    generator = torch.Generator().manual_seed(0)
    gamma = torch.rand(HEAD_DIM, generator=generator) * 2 + 0.7
    chosen = softmax_max_from_qk_norm(gamma, gamma, 600)
    assert chosen.fits
    q, k = (torch.randn(1, n, HEAD_DIM, generator=generator) for n in (50, 600))
    peak = torch.zeros(HEAD_DIM)
    peak[gamma.argmax()] = 1
    q[0, 7] = k[0, 11] = peak
    q, k = (t / t.square().mean(-1, keepdim=True).sqrt() * gamma for t in (q, k))
    scores = q.double() @ k.double().mT / HEAD_DIM**0.5
    assert float(scores.max()) == pytest.approx(chosen.hard_bound, rel=1e-5)
    v = torch.randn(1, 600, HEAD_DIM, generator=generator)
    arguments = [t.transpose(1, 2).contiguous().bfloat16() for t in (q, k)]
    for backend in ("torch", "sim"):
        got = attention_const_max(*arguments, v.bfloat16(), chosen.softmax_max, backend=backend)
        assert got.isfinite().all()


@pytest.mark.parametrize(
    ("q", "k", "keys", "argument"),
    [
        (torch.ones(4), torch.ones(5), 8, "k_norm_weight"),
        (torch.ones(2, 4), torch.ones(4), 8, "q_norm_weight"),
        (torch.ones(4), torch.tensor([1.0, torch.nan]), 8, "k_norm_weight"),
        (torch.full((4,), torch.inf), torch.ones(4), 8, "q_norm_weight"),
        (torch.ones(4), torch.ones(4), 0, "num_keys"),
        (torch.ones(4), torch.ones(4), 8.0, "num_keys"),
        (None, torch.ones(4), 8, "q_norm_weight"),
    ],
)
def test_bad_input(q, k, keys, argument):
    with pytest.raises(ArgumentError) as caught:
        softmax_max_from_qk_norm(q, k, keys)
    assert caught.value.argument == argument
