"""The prefill's stages over random layouts, shapes and dtypes against the dense oracle; all ranks in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kvp.case import Case
from tests.kvp.in_process import prefill_in_process
from tests.tolerance import attention_tolerance


def check(case: Case) -> None:
    outs = prefill_in_process([case.arguments(rank) for rank in range(case.ranks)])
    out = torch.cat(outs)[:, : case.rows - case.padding]
    deviation = (out.double() - case.expected()).abs().max()
    assert deviation <= attention_tolerance(case.dtype, case.v, case.head_dim), case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    block_size = draw(st.sampled_from([1, 4, 16, 32]))
    rows = block_size * draw(st.integers(1, 200 // block_size if block_size < 32 else 12))
    kv_heads = draw(st.sampled_from([1, 1, 2, 4]))
    heads_per_kv = draw(st.integers(1, 3))
    heads = kv_heads * heads_per_kv * ranks
    layout = draw(st.sampled_from(["round_robin", "round_robin", "contiguous"]))
    prior = draw(st.integers(0, 300))
    blocks = (prior + rows) // block_size
    return Case(
        ranks=ranks,
        rows=rows,
        block_size=block_size,
        prior=prior,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 33, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])),
        layout=layout,
        window=draw(st.one_of(st.just(0), st.integers(1, 400))),
        padding=draw(st.integers(0, block_size - 1)),
        shuffled=draw(st.booleans()),
        absent=tuple(draw(st.lists(st.integers(0, max(0, blocks - 1)), max_size=3))),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=80, deadline=None)
@given(cases())
def test_random_cases(case):
    check(case)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(cases())
def test_many_random_cases(case):
    check(case)


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("layout", ["round_robin", "contiguous"])
def test_long_rows_in_real_proportions(layout, window):
    """Long enough that tiles are joined and cut, heads are chunked, and windows have an unmasked middle."""
    check(
        Case(
            ranks=4,
            rows=2048,
            block_size=128,
            prior=300,
            heads=8,
            kv_heads=2,
            head_dim=32,
            dtype=torch.bfloat16,
            layout=layout,
            window=window,
            padding=5,
        )
    )


def test_seen_nan_is_reported_and_not_spread():
    """A NaN in a written slot reaches exactly the queries that see it."""
    case = Case(ranks=2, rows=64, block_size=8, prior=5, window=20)
    arguments = [case.arguments(rank) for rank in range(2)]
    position = 33  # block 4: rank 0, local block 2
    table, cache = arguments[0]["block_tables"], arguments[0]["v_cache"]
    cache[int(table[0, 2]), 0, position % 8, 3] = torch.nan
    out = torch.cat(prefill_in_process(arguments))
    queries = torch.arange(5, 69)
    sees = (queries >= position) & (queries < position + 20)
    assert out[:, sees].isnan().all()
    deviation = (out.double() - case.expected()).abs()[:, ~sees].max()
    assert deviation <= attention_tolerance(case.dtype, case.v, case.head_dim)


def test_nothing_visible_anywhere_is_zero():
    case = Case(ranks=2, rows=32, block_size=8, absent=(0, 1, 2, 3))
    out = torch.cat(prefill_in_process([case.arguments(rank) for rank in range(2)]))
    assert (out == 0).all()


@pytest.mark.parametrize("window", [0, 5])
def test_caches_whose_last_dim_is_not_dense(window):
    """A cache with one KV head is read in place, whatever its strides."""
    case = Case(ranks=2, rows=32, block_size=8, prior=8, window=window, shuffled=False)
    arguments = [case.arguments(rank) for rank in range(2)]
    for rank in arguments:
        for name in ("q", "k_cache", "v_cache"):
            rank[name] = torch.stack([rank[name], torch.full_like(rank[name], 9.0)], -1)[..., 0]
    deviation = (torch.cat(prefill_in_process(arguments)).double() - case.expected()).abs().max()
    assert deviation <= attention_tolerance(case.dtype, case.v, case.head_dim)
