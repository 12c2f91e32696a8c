"""Collectives between ranks in processes of their own, as under torchrun."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn.sim import DivergenceError, jit, simulate
from nki_parallel_attn.sim import collectives as ncc
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.testing import run_ranks
from tests.patience import SOON


def copied(x):
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dst = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=src, src=x)
    if nl.num_programs() == 2:
        nisa.core_barrier(data=src, cores=(0, 1))
    return src, dst


def result(t):
    out = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out, src=t)
    return out


@jit
def exchange(x, groups):
    """An all-reduce over the world, then an all-to-all within each list of `groups`."""
    src, dst = copied(x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([list(range(sum(map(len, groups))))]), op=nl.add)
    swapped = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    ncc.all_to_all([src], [swapped], ncc.ReplicaGroup(groups), collective_dim=0)
    return result(dst), result(swapped)


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 2], [1, 3]]], ids=["pair", "two lists"])
@pytest.mark.parametrize("lnc", [1, 2])
def test_processes_agree_with_ranks_in_one_process(groups, lnc):
    size = sum(map(len, groups))

    def rank_main():
        return [simulate(exchange, lnc=lnc)(inputs(dist.get_rank()), groups) for _ in range(3)]

    together = simulate(exchange, world_size=size, lnc=lnc)([(inputs(r), groups) for r in range(size)])
    for rank, launches in enumerate(run_ranks(rank_main, size)):
        for reduced, swapped in launches:
            torch.testing.assert_close(reduced, together[rank][0], rtol=0, atol=0)
            torch.testing.assert_close(swapped, together[rank][1], rtol=0, atol=0)


@jit
def diverging(x, how):
    src, dst = copied(x)
    rank = how["rank"]
    if how["kind"] == "skips" and rank == 1:
        return result(src)
    if how["kind"] == "another collective" and rank == 1:
        ncc.all_to_all([src], [dst], ncc.ReplicaGroup([[0, 1]]), collective_dim=0)
    elif how["kind"] == "another group" and rank == 1:
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[1, 0]]), op=nl.add)
    elif how["kind"] == "fails" and rank == 1:
        raise ValueError("this rank has had enough")
    elif how["kind"] == "dies" and rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1]]), op=nl.add)
    return result(dst)


@pytest.mark.parametrize("kind", ["skips", "another collective", "another group", "fails"])
def test_divergence_is_reported_within_seconds(kind):
    def rank_main():
        start = time.monotonic()
        try:
            simulate(diverging)(inputs(0), {"rank": dist.get_rank(), "kind": kind})
        except (DivergenceError, ValueError) as error:
            return str(error), type(error).__name__, time.monotonic() - start
        return "", "", 0.0

    results = run_ranks(rank_main, 2)
    message, name, seconds = results[0]
    assert name == "DivergenceError"
    assert seconds < SOON
    assert "rank 1" in message and "test_process_transport.py:" in message, message
    if kind == "fails":
        assert "had enough" in message


def test_a_dead_rank_is_reported_within_seconds(survivors_finish):
    def rank_main():
        start = time.monotonic()
        with pytest.raises(DivergenceError, match="died"):
            simulate(diverging)(inputs(0), {"rank": dist.get_rank(), "kind": "dies"})
        assert time.monotonic() - start < SOON
        raise RuntimeError("the survivor saw it")

    from nki_parallel_attn.errors import RankFailedError

    with pytest.raises(RankFailedError, match="the survivor saw it"):
        run_ranks(rank_main, 2)
