"""Collectives that the worlds' test leaves out: reducing rings, rank registers, run-time counts, coalescing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nki_parallel_attn.sim import NkiValidationError, jit, simulate
from nki_parallel_attn.sim import collectives as ncc
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import collectives as oracle

RNG = np.random.default_rng(0)


def scratch(x, buffer=nl.private_hbm):
    t = nl.ndarray(x.shape, dtype=x.dtype, buffer=buffer)
    nisa.dma_copy(dst=t, src=x)
    return t


def empty(shape, dtype, buffer=nl.private_hbm):
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


def result(t):
    out = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=t)
    return out


@jit
def ring_that_reduces(x, y, ranks):
    dst = empty(x.shape, x.dtype)
    group = ncc.ReplicaGroup([ranks])
    ncc.collective_permute_implicit_reduce([[scratch(x)]], [[scratch(y)]], [[dst]], group, op=nl.add)
    return result(dst)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_a_ring_step_that_reduces(ranks):
    xs, ys = (RNG.standard_normal((4, 3, 5)).astype(np.float32) for _ in range(2))
    results = simulate(ring_that_reduces, world_size=4)([(x, y, ranks) for x, y in zip(xs, ys, strict=True)])
    expected = oracle.collective_permute_implicit_reduce([xs[r] for r in ranks], [ys[r] for r in ranks], "add")
    for rank, right in zip(ranks, expected, strict=True):
        np.testing.assert_allclose(results[rank], right, rtol=2e-7)


@jit
def ring_attention_order(x, ranks):
    """Row i of the result: the rank register of step i of the ring, and the world's rank."""
    group = ncc.ReplicaGroup([ranks])
    seen = nl.ndarray((1, 2 * len(ranks)), dtype=nl.int32, buffer=nl.sbuf)
    for step in range(len(ranks)):
        register = ncc.collective_permute_implicit_current_processing_rank_id(step, group)
        nisa.register_store(seen[:, 2 * step : 2 * step + 1], register)
        nisa.register_store(seen[:, 2 * step + 1 : 2 * step + 2], ncc.rank_id())
    return result(seen)


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 0, 1]])
def test_the_registers_say_whose_data_a_step_handles(ranks):
    results = simulate(ring_attention_order, world_size=3)([(np.zeros((1, 1), np.float32), ranks)] * 3)
    for rank in range(3):
        right = [[oracle.processing_rank(ranks, rank, step), rank] for step in range(3)]
        np.testing.assert_array_equal(results[rank].reshape(3, 2), right)


@jit
def exchange_of_counts(x, y, metadata, ranks):
    src, dst = empty(x.shape, x.dtype, nl.shared_hbm), empty(y.shape, y.dtype, nl.shared_hbm)
    counts = empty(metadata.shape, metadata.dtype, nl.shared_hbm)
    out, out_counts = empty(y.shape, y.dtype, nl.shared_hbm), empty(metadata.shape, metadata.dtype, nl.shared_hbm)
    first = nl.program_id(0) == 0
    if first:
        for t, given in ((src, x), (dst, y), (counts, metadata)):
            nisa.dma_copy(dst=t, src=given)
    nisa.core_barrier(data=src, cores=(0, 1))
    rows = metadata.shape[0]
    ncc.all_to_all_v([src], [dst], ncc.ReplicaGroup([ranks]), counts, has_rdispls=rows == 4)
    if first:
        nisa.dma_copy(dst=out, src=dst)
        nisa.dma_copy(dst=out_counts, src=counts)
    return out, out_counts


@pytest.mark.parametrize("rdispls", [False, True])
def test_all_to_all_v(rdispls):
    size, slot = 8, 6
    ranks = list(range(size))
    counts = RNG.integers(0, slot, (size, size))
    displs = RNG.integers(0, 40 - slot, (size, size))
    places = np.stack([RNG.permutation(size) * slot for _ in range(size)])
    xs = RNG.standard_normal((size, 40)).astype(np.float32)
    ys = RNG.standard_normal((size, size * slot)).astype(np.float32)
    rows = [counts, displs, np.zeros_like(counts)] + ([places] if rdispls else [])
    arguments = [(xs[r], ys[r], np.stack([row[r] for row in rows]).astype(np.uint32), ranks) for r in ranks]
    results = simulate(exchange_of_counts, world_size=size, lnc=2, target="trn3")(arguments)
    expected, received = oracle.all_to_all_v(list(xs), list(ys), counts, displs, places if rdispls else None)
    for rank in ranks:
        np.testing.assert_array_equal(results[rank][0], expected[rank])
        np.testing.assert_array_equal(results[rank][1][2], received[rank])


def test_all_to_all_v_within_a_node_is_refused_before_trn3():
    x, y, metadata = np.zeros(8, np.float32), np.zeros(8, np.float32), np.zeros((3, 8), np.uint32)
    with pytest.raises(NkiValidationError) as caught:
        simulate(exchange_of_counts, world_size=8, lnc=2, target="trn2")([(x, y, metadata, list(range(8)))] * 8)
    assert caught.value.rule == "all-to-all-v"


@jit
def several_at_once(x, y):
    xs, ys = empty((2, 4), x.dtype), empty((2, 7), y.dtype)
    ncc.all_gather([scratch(x), scratch(y)], [xs, ys], ncc.ReplicaGroup([[1, 0]]), collective_dim=0)
    return result(xs), result(ys)


def test_one_call_gathers_several_tensors_in_the_order_of_the_list():
    xs = RNG.standard_normal((2, 1, 4)).astype(np.float32)
    ys = RNG.standard_normal((2, 1, 7)).astype(ml_dtypes.bfloat16)
    for gathered in simulate(several_at_once, world_size=2)([(xs[r], ys[r]) for r in range(2)]):
        np.testing.assert_array_equal(gathered[0], np.concatenate([xs[1], xs[0]]))
        np.testing.assert_array_equal(
            np.asarray(gathered[1], np.float32), np.concatenate([ys[1], ys[0]]).astype(np.float32)
        )


@jit
def in_place(x):
    t = scratch(x)
    ncc.all_to_all([t], [t], ncc.ReplicaGroup([[0, 1]]), collective_dim=0)
    return result(t)


def test_a_collective_in_place():
    xs = RNG.standard_normal((2, 4, 3)).astype(np.float32)
    for rank, got in enumerate(simulate(in_place, world_size=2)([(x,) for x in xs])):
        np.testing.assert_array_equal(got, oracle.all_to_all(list(xs))[rank])


@jit
def sum_in_bfloat16(x):
    dst = empty(x.shape, x.dtype)
    ncc.all_reduce([scratch(x)], [dst], ncc.ReplicaGroup([list(range(8))]), op=nl.add)
    return result(dst)


def test_a_bfloat16_sum_is_rounded_once():
    xs = RNG.standard_normal((8, 4, 16)).astype(ml_dtypes.bfloat16)
    exact = xs.astype(np.float64).sum(0)
    for got in simulate(sum_in_bfloat16, world_size=8)([(x,) for x in xs]):
        # Half a unit in the last of bfloat16's 8 significant bits, and the float32 sum of 8 terms.
        np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2.0**-8, atol=8 * 2.0**-22)


@jit
def random_tiles(x):
    uniform = nl.rand((64, 256), dtype=nl.float32)
    kept = nl.dropout(nl.ones((64, 256), dtype=nl.float32), rate=0.25)
    return result(uniform), result(kept)


def test_random_tiles_follow_their_distribution_and_the_seed():
    x = np.zeros((1, 1), np.uint32)
    uniform, kept = simulate(random_tiles, seed=3)(x)
    again, _ = simulate(random_tiles, seed=3)(x)
    other, _ = simulate(random_tiles, seed=4)(x)
    np.testing.assert_array_equal(uniform, again)
    assert (uniform != other).mean() > 0.9
    assert ((uniform >= 0) & (uniform < 1)).all()
    # 16384 draws: six standard errors of a mean.
    assert abs(uniform.mean() - 0.5) < 6 * np.sqrt(1 / 12 / uniform.size)
    assert set(np.unique(kept)) <= {0.0, 1.0}
    assert abs((kept == 0).mean() - 0.25) < 6 * np.sqrt(0.25 * 0.75 / kept.size)
