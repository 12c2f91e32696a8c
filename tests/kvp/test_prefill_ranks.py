"""The operation on real rank processes against the dense oracle."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn import ReplicaGroup, attention_kv_parallel_segmented_cte
from nki_parallel_attn.backends.process_groups import process_group_for
from nki_parallel_attn.kernels.collectives_torch import exchange_for
from nki_parallel_attn.testing import run_ranks
from tests.kvp.case import Case
from tests.tolerance import attention_tolerance

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def check(case: Case, index: int, **overrides) -> None:
    """Run one rank of the case and compare its heads."""
    out = attention_kv_parallel_segmented_cte(**(case.arguments(index) | overrides))
    heads, rows, dim = case.heads // case.ranks, case.rows, case.head_dim
    assert out.shape == ((heads, dim, rows) if case.tp_out else (heads, rows, dim))
    assert out.dtype == case.dtype and out.is_contiguous()
    out = (out.transpose(1, 2) if case.tp_out else out)[:, : rows - case.padding]
    deviation = (out.double() - case.expected()[case.heads_of(index)]).abs().max()
    assert deviation <= attention_tolerance(case.dtype, case.v, dim), case


@pytest.mark.multirank(world_size=4)
def test_everything_at_once_on_four_ranks(rank):
    """Shuffled tables, a ragged prefix, a window, padding, NaN in every slot that holds no token, two KV heads."""
    check(Case(ranks=4, rows=512, block_size=16, prior=37, kv_heads=2, dtype=BF16, window=100, padding=9), rank)


def grid(ranks: int) -> list[Case]:
    heads = 2 * ranks
    common = {"ranks": ranks, "heads": heads, "rows": 96}
    return [
        Case(**common, block_size=16),
        Case(**common, block_size=32, dtype=BF16, tp_out=True),
        Case(**common, block_size=8, dtype=FP16, kv_heads=2, prior=21),
        Case(**common, block_size=16, dtype=BF16, layout="contiguous", prior=50, padding=3),
        Case(**common, block_size=16, layout="contiguous", window=40, kv_heads=2, tp_out=True),
        Case(**common, block_size=16, window=1, head_dim=128, dtype=BF16),
        Case(**common, block_size=16, prior=160, apc=True, absent=(0, 1, 9)),
        Case(**common, block_size=16, prior=75, apc=True, window=30, dtype=BF16),
        Case(**common, block_size=4, scale=1.0, head_dim=8, shuffled=False),
    ]


def run_grid(ranks: int) -> None:
    for case in grid(ranks):
        check(case, dist.get_rank())


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_grid(ranks):
    run_ranks(run_grid, ranks, args=(ranks,))


def test_one_rank_without_process_group():
    for case in grid(1):
        check(case, 0)


@pytest.mark.multirank(world_size=4)
def test_several_replica_groups_at_once(rank):
    """Two strided groups, each with its own sequence, and a group that covers part of the world."""
    groups = ReplicaGroup([[0, 2], [1, 3]])
    for seed in range(2):
        case = Case(ranks=2, rows=64, block_size=16, seed=10 * seed + rank % 2, dtype=BF16)
        check(case, groups.index_of(rank), replica_groups=groups)
    if rank in (1, 2):
        check(Case(ranks=2, rows=64, block_size=16), rank - 1, replica_groups=ReplicaGroup([[1, 2]]))
    check(Case(ranks=1, rows=64, block_size=16, seed=rank), 0, replica_groups=ReplicaGroup([[r] for r in range(4)]))


@pytest.mark.multirank(world_size=2)
def test_given_process_group_and_check_modes(rank):
    group = dist.new_group([0, 1])
    case = Case(ranks=2, rows=64, block_size=16)
    for mode in ("always", "first", "first", "never", None):
        check(case, rank, group=group, check_ranks=mode)


@pytest.mark.multirank(world_size=4)
def test_segments_never_change_the_result(rank):
    case = Case(ranks=4, rows=256, block_size=16, dtype=BF16, prior=20)
    outs = [
        attention_kv_parallel_segmented_cte(**(case.arguments(rank) | {"seg_size": seg})) for seg in (16, 32, 128, 256)
    ]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.multirank(world_size=4)
def test_apc_in_two_calls_equals_one(rank):
    """Prefill 128 tokens, then 128 more over a prefix whose length is known at run time only."""
    whole = Case(ranks=4, rows=256, block_size=16, dtype=BF16)
    arguments = whole.arguments(rank)
    expected = attention_kv_parallel_segmented_cte(**arguments)
    prior = torch.tensor([[128 // 4]], dtype=torch.int32)
    second = attention_kv_parallel_segmented_cte(
        **(
            arguments
            | {
                "q": arguments["q"][:, 128:].contiguous(),
                "kvp_q_offset": torch.tensor([[128]], dtype=torch.int32),
                "apc_mode": True,
                # The first query's own block holds later positions too, so it does not count.
                "valid_num_prior_tokens": prior,
            }
        )
    )
    deviation = (second.double() - expected[:, 128:].double()).abs().max()
    assert deviation <= 2 * attention_tolerance(BF16, whole.v, whole.head_dim)


@pytest.mark.multirank(world_size=2)
def test_shared_prefix_blocks(rank):
    """Two logical blocks may be one physical block: the keys of positions 0..15 repeat at 32..47 on rank 0."""
    case = Case(ranks=2, rows=64, block_size=16)
    case.k[:, 32:48], case.v[:, 32:48] = case.k[:, :16].clone(), case.v[:, :16].clone()
    arguments = case.arguments(rank)
    if rank == 0:
        table = arguments["block_tables"]
        arguments["k_cache"][table[0, 1]], arguments["v_cache"][table[0, 1]] = torch.nan, torch.nan
        table[0, 1] = table[0, 0]
    out = attention_kv_parallel_segmented_cte(**arguments)
    deviation = (out.double() - case.expected()[case.heads_of(rank)]).abs().max()
    assert deviation <= attention_tolerance(case.dtype, case.v, case.head_dim)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_overlapping_groups_in_turn(monkeypatch, transport):
    """Ranks that have made different numbers of groups before find each other when they make the next one."""
    monkeypatch.setenv("NKI_PARALLEL_ATTN_TRANSPORT", transport)
    run_ranks(overlapping_groups, 4)


def overlapping_groups() -> None:
    rank = dist.get_rank()
    for seed in range(2):
        for group in ((0, 1), (1, 2), (2, 3), (1, 2, 3), (0, 1, 2, 3)):
            if rank in group:
                size = len(group)
                case = Case(ranks=size, rows=32, block_size=8, heads=2 * size, seed=seed)
                check(case, group.index(rank), replica_groups=ReplicaGroup([group]))


def timeout_of_a_group() -> float:
    exchange = exchange_for(process_group_for((0, 1)))
    return exchange._timeout if exchange.transport == "shm" else exchange.timeout


def test_groups_wait_as_long_as_the_default_group():
    """run_ranks gives the default group its timeout and a minute; torch gives other groups half an hour."""
    assert run_ranks(lambda: timeout_of_a_group() if dist.get_rank() < 2 else 67, 3, timeout=7) == [67, 67, 67]
