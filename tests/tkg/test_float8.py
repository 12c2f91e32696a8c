"""Widening float8: every code, whatever its neighbours and the mode for denormal numbers."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.kernels.float8_torch import widen

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = CODES[~CODES.to(torch.float32).isnan()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("codes", [CODES, FINITE, FINITE.view(2, 127).T], ids=["all", "finite", "strided"])
@pytest.mark.parametrize("flush", [False, True])
def test_every_code(codes: torch.Tensor, dtype: torch.dtype, flush: bool) -> None:
    expected = codes.to(torch.float32).to(dtype)
    torch.set_flush_denormal(flush)
    try:
        target = torch.full((len(codes), 2, *codes.shape[1:]), torch.nan, dtype=dtype)[:, 0]
        assert widen(codes, target) is target
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(target.nan_to_num(-1000.0), expected.nan_to_num(-1000.0))
