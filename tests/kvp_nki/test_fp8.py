"""float8 caches, plain and packed, with scales, against the oracle on the dequantised values."""

from __future__ import annotations

import pytest
import torch

from tests.kvp.case import Case
from tests.kvp.test_prefill_fp8 import Quantised
from tests.kvp_nki.world import deviation, run
from tests.tolerance import attention_tolerance


@pytest.mark.parametrize(("target", "lnc"), [("trn2", 2), ("trn3", 1)])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8(dtype, packed, target, lnc):
    """An odd number of tokens, so that a packed pair ends in a slot that nothing was written to."""
    generator = torch.Generator().manual_seed(5)
    k_scale = 2.0 ** torch.randint(-3, 3, (128, 1), generator=generator).float()
    v_scale = torch.full((128, 1), 0.25)
    case = Case(ranks=2, rows=96, block_size=16, prior=11, kv_heads=2, head_dim=48, dtype=dtype, padding=2, heads=4)
    quantised = Quantised(case, k_scale, v_scale)
    outs = run([quantised.arguments(rank, packed) for rank in range(2)], lnc=lnc, target=target)
    assert deviation(case, outs) <= attention_tolerance(dtype, case.v, case.head_dim)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_fp8_without_scales(packed):
    case = Case(ranks=2, rows=128, block_size=32, head_dim=128, dtype=torch.bfloat16, heads=2)
    outs = run([Quantised(case, None, None).arguments(rank, packed) for rank in range(2)])
    assert deviation(case, outs) <= attention_tolerance(case.dtype, case.v, case.head_dim)


@pytest.mark.parametrize("window", [2, 24])
def test_packed_pair_whose_first_slot_no_query_sees(window):
    """The window's left edge is within a pair: its second slot counts, its first may hold anything."""
    prior = 120
    case = Case(ranks=2, rows=48, block_size=24, prior=prior, head_dim=32, window=window, heads=2)
    arguments = [Quantised(case, None, None).arguments(rank, True) for rank in range(2)]
    shards, before = case.shards(), torch.arange(prior - window + 1)
    for rank, given in enumerate(arguments):
        slots = shards.slot(before[shards.owner(before) == rank])
        blocks, places = given["block_tables"][0, slots // 24].long(), slots % 24
        given["k_cache"].view(torch.uint8)[blocks, :, places // 2, :, places % 2] = 0x7F
    assert deviation(case, run(arguments, lnc=2)) <= attention_tolerance(case.dtype, case.v, case.head_dim)
