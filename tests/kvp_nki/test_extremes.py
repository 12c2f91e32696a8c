"""Scores and scales at the ends of their ranges, where a lost maximum or a rounding in the wrong place shows."""

from __future__ import annotations

import torch

from tests.kvp.case import Case
from tests.kvp_nki.world import check

BF16 = torch.bfloat16


def test_maximum_of_a_segment_over_several_units():
    """A segment's largest scores are in its first unit of 512 slots, by 200; the next segment is prepared meanwhile."""
    case = Case(ranks=1, rows=128, block_size=128, prior=4096, heads=8, head_dim=16, dtype=BF16, scale=1.0)
    case.q[:, :, 0], case.q[:, :, 1:] = 1, 0
    case.k[:, :, 0] = -100
    case.k[:, 0:512, 0] = case.k[:, 2048:2560, 0] = 100
    check(case)
