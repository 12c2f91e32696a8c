"""The operation on real rank processes against the float64 oracle, and a rank that dies."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn import AttentionShape, Interleaved, ShardingPlan, attention_block_tkg
from nki_parallel_attn.backends import torch as torch_backend
from nki_parallel_attn.errors import PeerError, RankFailedError
from nki_parallel_attn.kernels import attention_block_tkg_torch
from nki_parallel_attn.kernels.collectives_torch import TRANSPORT_VARIABLE
from nki_parallel_attn.testing import run_ranks
from tests.patience import SOON
from tests.tkg.case import Case
from tests.tkg.compare import check_rank

BF16 = torch.bfloat16


def check(case: Case, index: int, ranks: list[int] | None = None, **overrides: object) -> None:
    arguments = case.arguments(index, ranks) | overrides
    check_rank(case, index, arguments, attention_block_tkg(**arguments))


def grid(kvdp: int, cp: int) -> list[Case]:
    common = {"kvdp": kvdp, "cp": cp, "batch": 4}
    several = {**common, "tokens": 3, "kv_heads": 2}
    return [
        Case(**several, cache="block4", mask="pos_ids", out="bias", rope="contiguous", pre="gamma", sink=True, seed=1),
        Case(**several, cache="packed4", fp8="opaque", window=6, tree=True, layout="interleaved 1", seed=2),
        Case(**several, cache="flat", mask="full", padding="row", out="transposed", post="plain", bias=True, seed=3),
        Case(**common, cache="flat_t", mask="swapped", dtype=BF16, rmsnorm_x="gamma", layout="contiguous", seed=4),
        Case(**common, cache="block3", dtype=BF16, update=False, rope="interleaved partial", seed=5),
        Case(**common, cache="flat", kvdp_mode="ALL_TO_ALL", cp_mode="REDUCE_SCATTER", transposed_in=True, seed=6),
        Case(**several, cache="flat", kvdp_mode="ALL_GATHER_SLICE", cp_mode="ALL_TO_ALL", fp8="fp8", seed=7),
    ]


def run_grid(kvdp: int, cp: int) -> None:
    for case in grid(kvdp, cp):
        check(case, dist.get_rank())


@pytest.mark.parametrize(("kvdp", "cp"), [(1, 2), (2, 1), (2, 2), (1, 3), (4, 2)])
def test_grid(kvdp, cp):
    run_ranks(run_grid, kvdp * cp, args=(kvdp, cp))


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_both_transports(transport):
    def body() -> None:
        os.environ[TRANSPORT_VARIABLE] = transport
        run_grid(2, 2)

    run_ranks(body, 4)


@pytest.mark.multirank(world_size=4)
def test_part_of_the_world(rank):
    """A KV group of two of four ranks, and two strided groups at once with a sequence each."""
    if rank in (1, 2):
        check(Case(cp=2, cache="block4"), rank - 1, [1, 2])
    ranks = [rank % 2, rank % 2 + 2]
    check(Case(kvdp=2, seed=rank % 2), ranks.index(rank), ranks)
    for mode in ("always", "first", "first", "never"):
        check(Case(cp=2, seed=rank % 2), ranks.index(rank), ranks, check_ranks=mode)


@pytest.mark.multirank(world_size=4)
def test_arguments_from_the_plan(rank):
    """The plan's view makes what the case makes from topology's functions."""
    case = Case(kvdp=2, cp=2, tokens=2, kv_heads=2, cache="block4", layout="interleaved 2", batch=4, seed=5)
    shape = AttentionShape(case.all_q_heads, case.kv_heads, case.head_dim)
    plan = ShardingPlan(shape, world_size=4, kvdp=2, cp=2, kv_layout=Interleaved(2), block_size=4)
    view, arguments = plan.rank(rank), case.arguments(rank)
    lists, count = case.block_lists(rank)
    table = torch.tensor([[*blocks] for blocks in lists], dtype=torch.int32)
    made = {
        **view.decode_arguments(),
        "pos_ids": view.pos_ids(case.positions),
        "attention_mask": view.attention_mask(case.positions),
        "active_blocks_table": view.active_blocks_table(lists, len(lists[0]), count),
        "kv_cache_update_idx": view.kv_cache_update_idx(case.positions, table),
    }
    check_rank(case, rank, arguments, attention_block_tkg(**(arguments | made)))


def die_in_the_middle(directory: Path, transport: str) -> None:
    os.environ[TRANSPORT_VARIABLE] = transport
    rank = dist.get_rank()
    case = Case(kvdp=2, cp=2, batch=4, cache="block4")
    check(case, rank)
    arguments = case.arguments(rank)
    before = [arguments[name].clone() for name in ("K_cache", "V_cache")]
    if rank == 1:
        attention_block_tkg_torch.attend = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    outcome, start = "fine", time.monotonic()
    try:
        attention_block_tkg(**arguments)
    except PeerError as error:
        outcome = str(error)
    unchanged = all(
        torch.equal(arguments[name].nan_to_num(9.0), cache.nan_to_num(9.0))
        for name, cache in zip(("K_cache", "V_cache"), before, strict=True)
    )
    (directory / str(rank)).write_text(json.dumps([outcome, time.monotonic() - start, unchanged]))
    os._exit(1)  # as a job's rank would after an error


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_killed_rank_makes_the_others_fail(tmp_path, transport, survivors_finish):
    """After the Q heads were exchanged: nobody hangs, nobody has written to its cache.

    Rank 2 is in no group with rank 1: over shared memory it hears of the failure from rank 3, over gloo when that ends.
    """
    with pytest.raises(RankFailedError, match="rank 1: died of SIGKILL"):
        run_ranks(die_in_the_middle, 4, args=(tmp_path, transport))
    for rank in (0, 2, 3):
        outcome, seconds, unchanged = json.loads((tmp_path / str(rank)).read_text())
        assert "died" in outcome and seconds < SOON and unchanged, (rank, outcome, seconds)


@pytest.mark.multirank(world_size=4)
def test_a_rank_that_fails_at_the_end_leaves_all_caches_alone(rank):
    """Rank 1 fails in its own output projection, when the others have all they need from it."""
    case = Case(kvdp=2, cp=2, batch=4, cache="block4", out="plain")
    check(case, rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(attention_block_tkg_torch.projection, "project_out", lambda *_: {}["missing"])
        for _ in range(2):
            arguments = case.arguments(rank)
            before = [arguments[name].clone() for name in ("K_cache", "V_cache")]
            with pytest.raises(KeyError if rank == 1 else PeerError, match="missing"):
                attention_block_tkg(**arguments)
            for name, cache in zip(("K_cache", "V_cache"), before, strict=True):
                assert torch.equal(arguments[name].nan_to_num(9.0), cache.nan_to_num(9.0))
    check(case, rank)


@pytest.mark.parametrize("late_for", ["exchanges_for", "decode"])
@pytest.mark.multirank(world_size=4)
def test_a_rank_that_comes_late_to_a_failure_passes_it_on(rank, late_for):
    """Rank 1 fails before it has exchanged anything. Rank 0 hears of it on its way into the KVDP group that they share,
    while rank 2, which shares no group with rank 1, waits for rank 0 in their CP group."""
    case = Case(kvdp=2, cp=2, batch=4, cache="block4")
    check(case, rank)
    store = dist.distributed_c10d._get_default_store()
    original = getattr(torch_backend, late_for)

    def late(*arguments: object) -> object:
        store.wait([late_for])
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(torch_backend, late_for, late)
        if rank == 1:
            patch.setattr(attention_block_tkg_torch, "new_tokens", lambda *_: {}["missing"])
        start = time.monotonic()
        with pytest.raises(KeyError if rank == 1 else PeerError, match="missing"):
            attention_block_tkg(**case.arguments(rank))
        assert time.monotonic() - start < SOON
        if rank == 3:  # which has traded with rank 2 by then
            store.set(late_for, "")
    check(case, rank)
