"""What is not visible has no effect: NaN, absent blocks, ranks and rows that see nothing."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.sim import ReplicaGroup
from tests.kvp.case import Case
from tests.kvp_nki.world import check, deviation, run
from tests.tolerance import attention_tolerance


@pytest.mark.parametrize("lnc", [1, 2])
def test_rank_without_visible_kv(lnc):
    """Ranks 1 to 3 hold later blocks only, NaN from end to end."""
    check(Case(ranks=4, rows=64, block_size=64, heads=4, dtype=torch.bfloat16), lnc=lnc)


def test_nothing_visible_anywhere_is_zero():
    case = Case(ranks=2, rows=64, block_size=16, heads=2, absent=(0, 1, 2, 3))
    for out in run([case.arguments(rank) for rank in range(2)]):
        assert (out == 0).all()


def test_rows_that_see_nothing_are_zero():
    """The first two blocks are absent, so the first rows of the tile see nothing and the others do."""
    check(Case(ranks=2, rows=64, block_size=16, heads=2, absent=(0, 1)))


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("layout", ["round_robin", "contiguous"])
def test_seen_nan_is_reported_and_not_spread(layout, lnc):
    """A NaN in a written slot reaches exactly the queries that see it, in the same tile as others that do not."""
    case = Case(ranks=2, rows=64, block_size=8, prior=5, window=20, layout=layout, heads=4)
    arguments = [case.arguments(rank) for rank in range(2)]
    position = 33
    shards = case.shards()
    owner, slot = int(shards.owner(position)), int(shards.slot(position))
    for name in ("v_cache", "k_cache"):
        given = [dict(rank) for rank in arguments]
        given[owner][name] = given[owner][name].clone()
        given[owner][name][int(given[owner]["block_tables"][0, slot // 8]), 0, position % 8, 3] = torch.nan
        out = torch.cat(run(given, lnc=lnc))
        queries = torch.arange(5, 69)
        sees = (queries >= position) & (queries < position + 20)
        assert out[:, sees].isnan().all()
        far = (out.double() - case.expected()).abs()[:, ~sees].max()
        assert far <= attention_tolerance(case.dtype, case.v, case.head_dim)


def test_shared_prefix_blocks():
    """Two logical blocks may be one physical block: the keys of positions 0..15 repeat at 32..47 on rank 0."""
    case = Case(ranks=2, rows=64, block_size=16, heads=4)
    case.k[:, 32:48], case.v[:, 32:48] = case.k[:, :16].clone(), case.v[:, :16].clone()
    arguments = [case.arguments(rank) for rank in range(2)]
    table = arguments[0]["block_tables"]
    for name in ("k_cache", "v_cache"):
        arguments[0][name][table[0, 1]] = torch.nan
    table[0, 1] = table[0, 0]
    assert deviation(case, run(arguments)) <= attention_tolerance(case.dtype, case.v, case.head_dim)


def test_large_scores_neither_overflow_nor_vanish():
    """Scores of some thousands, in rows whose maxima differ as much, and masked keys above all visible ones."""
    case = Case(ranks=2, rows=128, block_size=16, heads=2, head_dim=32, scale=1.0)
    case.q.mul_(torch.linspace(0.1, 100, 128)[:, None])
    case.k.mul_(torch.linspace(0.1, 10, 128)[:, None])
    outs = run([case.arguments(rank) for rank in range(2)])
    # A score's rounding error grows with the score; weights are exp of it.
    scores = (case.q.double() @ case.k.double().transpose(1, 2)).abs().max()
    error = float(case.v.abs().max()) * 4 * case.head_dim * 2.0**-24 * float(scores)
    assert 1000 < scores < 1e5
    assert deviation(case, outs) <= error


@pytest.mark.parametrize("lnc", [1, 2])
def test_two_replica_groups(lnc):
    """Strided groups of a world of four, each with its own sequence."""
    groups = ReplicaGroup([[0, 2], [1, 3]])
    cases = [Case(ranks=2, rows=64, block_size=16, heads=4, seed=seed) for seed in (1, 2)]
    arguments = [cases[rank % 2].arguments(rank // 2) | {"replica_groups": groups} for rank in range(4)]
    outs = run(arguments, lnc=lnc)
    for number, case in enumerate(cases):
        assert deviation(case, outs[number::2]) <= attention_tolerance(case.dtype, case.v, case.head_dim)
