"""No race between cores and collectives, whatever order the simulator runs them in, and one result."""

from __future__ import annotations

import pytest
import torch

from tests.kvp.case import Case
from tests.kvp_nki.world import check, run

CASE = Case(ranks=2, rows=208, block_size=16, heads=2, head_dim=16, dtype=torch.bfloat16, prior=9)


@pytest.mark.parametrize("decade", range(5))
def test_fifty_seeds(decade):
    arguments = [CASE.arguments(rank) | {"seg_size": 16} for rank in range(2)]
    first = run(arguments, lnc=2)
    for seed in range(10 * decade, 10 * decade + 10):
        outs = run(arguments, lnc=2, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(outs, first, strict=True))
    check(CASE, lnc=2, seg_size=16)
