"""Worlds of many ranks in one process: collectives against their definition, divergence found without waiting."""

from __future__ import annotations

import numpy as np
import pytest

from nki_parallel_attn.sim import DeadlockError, DivergenceError, jit, simulate
from nki_parallel_attn.sim import collectives as ncc
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import collectives as oracle

SIZES = [2, 8, 64]


def private(x, shape=None):
    """A private copy of x and a private tensor for the result."""
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(dst=src, src=x)
    return src, nl.ndarray(shape or x.shape, dtype=x.dtype, buffer=nl.private_hbm)


def result(t):
    out = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=t)
    return out


@jit
def every_collective(x, lists):
    """x [size, 3] of the list's size: all_reduce, all_gather, reduce_scatter, all_to_all, a ring of one step."""
    group = ncc.ReplicaGroup(lists)
    size = group.group_size
    results = []
    src, dst = private(x)
    ncc.all_reduce([src], [dst], group, op=nl.add)
    results.append(result(dst))
    src, dst = private(x, (size * size, 3))
    ncc.all_gather([src], [dst], group, collective_dim=0)
    results.append(result(dst))
    src, dst = private(x, (1, 3))
    ncc.reduce_scatter([src], [dst], group, collective_dim=0, op=nl.maximum)
    results.append(result(dst))
    src, dst = private(x)
    ncc.all_to_all([src], [dst], group, collective_dim=0)
    results.append(result(dst))
    src, dst = private(x)
    ncc.collective_permute_implicit([[src]], [[dst]], group)
    results.append(result(dst))
    return results


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lists", ["whole", "halves", "strided"])
def test_collectives(size, lists, seed):
    groups = {
        "whole": [list(range(size))],
        "halves": [list(range(size // 2)), list(range(size // 2, size))],
        "strided": [list(range(start, size, 2))[::-1] for start in range(2)],
    }[lists]
    rng = np.random.default_rng(size)
    xs = [rng.standard_normal((len(groups[0]), 3)).astype(np.float32) for _ in range(size)]
    results = simulate(every_collective, world_size=size, seed=seed)([(x, groups) for x in xs])
    for group in groups:
        mine = [xs[rank] for rank in group]
        expected = [
            oracle.all_reduce(mine, "add"),
            oracle.all_gather(mine, 0),
            oracle.reduce_scatter(mine, "maximum"),
            oracle.all_to_all(mine),
            oracle.collective_permute_implicit(mine),
        ]
        for index, rank in enumerate(group):
            for got, right in zip(results[rank], expected, strict=True):
                # float32 sums of at most 64 terms of size about 1.
                np.testing.assert_allclose(got, right[index], rtol=1e-5, atol=64 * 2**-23)


@jit
def diverging(x, rank, size, kind):
    world = ncc.ReplicaGroup([list(range(size))])
    src, dst = private(x)
    odd = rank == size - 1
    if kind == "ends early" and odd:
        return result(src)
    if kind == "another collective" and odd:
        ncc.all_to_all([src], [dst], world, collective_dim=0)
    elif kind == "another operator" and odd:
        ncc.all_reduce([src], [dst], world, op=nl.maximum)
    elif kind == "another shape" and odd:
        ncc.all_reduce([src[: size // 2, :]], [dst[: size // 2, :]], world, op=nl.add)
    elif kind == "another group" and odd:
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[rank, 0]]), op=nl.add)
    elif kind == "one more" and odd:
        ncc.all_reduce([src], [dst], world, op=nl.add)
        ncc.all_reduce([src], [dst], world, op=nl.add)
    else:
        ncc.all_reduce([src], [dst], world, op=nl.add)
    return result(dst)


KINDS = ["ends early", "another collective", "another operator", "another shape", "another group", "one more"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_divergence_names_ranks_calls_and_lines(size, kind):
    x = np.ones((size, 4), np.float32)
    for seed in (None, 0):
        with pytest.raises(DivergenceError) as caught:
            simulate(diverging, world_size=size, seed=seed)([(x, rank, size, kind) for rank in range(size)])
        message = str(caught.value)
        assert f"rank {size - 1}" in message
        assert "all_reduce" in message
        assert "test_worlds.py:" in message


@jit
def half_a_barrier(x):
    shared = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.core_barrier(data=shared, cores=(0, 1))
    return result(x)


def test_deadlock_between_cores_names_the_waiting_core():
    with pytest.raises(DeadlockError, match=r"rank 1 core 0 waits for the other core in core_barrier at .*test_worlds"):
        simulate(half_a_barrier, world_size=2, lnc=2, checks=False)([(np.ones((2, 2), np.float32),)] * 2)


@jit
def record_order(x, log, rank):
    src, dst = private(x)
    for _ in range(3):
        log.append(rank)
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1, 2, 3]]), op=nl.add)
    return result(dst)


def test_a_seed_reproduces_the_schedule():
    def order(seed):
        log: list[int] = []
        x = np.ones((2, 2), np.float32)

        class Log:
            append = staticmethod(log.append)

        simulate(record_order, world_size=4, seed=seed)([(x, Log, rank) for rank in range(4)])
        return log

    assert order(None) == order(None)
    orders = [order(seed) for seed in range(8)]
    assert orders == [order(seed) for seed in range(8)]
    assert len({tuple(o) for o in orders}) > 1
