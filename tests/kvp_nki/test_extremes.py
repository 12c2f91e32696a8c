"""Scores and scales at the ends of their ranges, where a lost maximum or a rounding in the wrong place shows."""

from __future__ import annotations

import pytest
import torch

from tests.kvp.case import Case
from tests.kvp_nki.world import check, deviation, run
from tests.tolerance import attention_tolerance

BF16 = torch.bfloat16


def test_maximum_of_a_segment_over_several_units():
    """A segment's largest scores are in its first unit of 512 slots, by 200; the next segment is prepared meanwhile."""
    case = Case(ranks=1, rows=128, block_size=128, prior=4096, heads=8, head_dim=16, dtype=BF16, scale=1.0)
    case.q[:, :, 0], case.q[:, :, 1:] = 1, 0
    case.k[:, :, 0] = -100
    case.k[:, 0:512, 0] = case.k[:, 2048:2560, 0] = 100
    check(case)


@pytest.mark.parametrize("window", [0, 2])
def test_low_scores_in_contiguous_shards(window):
    """Shards of part of a tile: what is beyond their end is no key with a score of 0."""
    case = Case(ranks=3, rows=72, block_size=8, head_dim=16, heads=3, layout="contiguous", window=window, scale=1.0)
    case.q[:, :, 0], case.q[:, :, 1:] = 1, 0
    case.k[:, :, 0] -= 500
    check(case, lnc=2)
    # More entries than blocks.
    arguments = [case.arguments(rank) for rank in range(3)]
    for given in arguments:
        given["block_tables"] = torch.nn.functional.pad(given["block_tables"], (0, 4), value=-1)
    assert deviation(case, run(arguments, lnc=2)) <= attention_tolerance(case.dtype, case.v, case.head_dim)


def test_low_scores_of_one_rank_whose_table_ends_early():
    case = Case(ranks=1, rows=64, block_size=16, head_dim=16, heads=1, layout="contiguous", absent=(2, 3), scale=1.0)
    case.q[:, :, 0], case.q[:, :, 1:] = 1, 0
    case.k[:, :, 0] -= 500
    given = case.arguments(0)
    given["block_tables"] = given["block_tables"][:, :2].contiguous()
    assert deviation(case, run([given])) <= attention_tolerance(case.dtype, case.v, case.head_dim)
