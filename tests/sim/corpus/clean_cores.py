"""Clean kernels of several cores and ranks: synchronised LNC sharing and correct collectives."""

from __future__ import annotations

import numpy as np

from nki_parallel_attn.sim import collectives as ncc
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from ..oracle import collectives as oracle
from .broken_cores import hbm
from .cases import Case, array, clean, f32
from .kernel_helpers import load, store

CASES: list[Case] = []


def output(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x)
    return out


@clean(CASES, lambda x: x, f32(128, 8), lnc=2)
def halves_written_by_two_cores(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.ds(nl.program_id(0) * 64, 64)
    nisa.dma_copy(dst=out[rows, :], src=load(x[rows, :]))
    return out


@clean(CASES, lambda x: x[::-1], f32(2, 8), lnc=2)
def exchange_between_cores(x):
    core = nl.program_id(0)
    received = nl.ndarray((1, 8), dtype=x.dtype, buffer=nl.sbuf)
    nisa.sendrecv(load(x[core : core + 1]), received, 1 - core, 1 - core, pipe_id=0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[core : core + 1], src=received)
    return out


@clean(CASES, lambda x: 2 * x, f32(128, 256), lnc=2)
def gpsimd_exchange_of_one_kib(x):
    other = 1 - nl.program_id(0)
    t, received = load(x), nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.sendrecv(t, received, other, other, pipe_id=0, dma_engine=nisa.dma_engine.gpsimd_dma)
    nisa.tensor_tensor(dst=t, data1=t, data2=received, op=nl.add)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.ds(nl.program_id(0) * 64, 64)
    nisa.dma_copy(dst=out[rows, :], src=t[rows, :])
    return out


@clean(CASES, lambda r, xs: oracle.all_reduce([x for (x,) in xs], "add")[r], f32(4, 8), world_size=4)
def all_reduce_in_hbm(x):
    src, dst = hbm(x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1, 2, 3]]), op=nl.add)
    return output(dst)


@clean(CASES, lambda r, xs: np.maximum(xs[r][0], xs[r ^ 1][0]), f32(4, 8), world_size=4)
def two_lists_at_once(x):
    src, dst = hbm(x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1], [2, 3]]), op=nl.maximum)
    return output(dst)


@clean(CASES, lambda r, xs: np.concatenate([x for (x,) in xs]), f32(4, 8), world_size=2)
def all_gather_in_hbm(x):
    src, dst = hbm(x, (8, 8))
    ncc.all_gather([src], [dst], ncc.ReplicaGroup([[0, 1]]), collective_dim=0)
    return output(dst)


@clean(CASES, lambda r, xs: np.concatenate([x for (x,) in xs], 1), f32(4, 8), world_size=2)
def all_gather_of_columns_in_sbuf(x):
    dst = nl.ndarray((4, 16), dtype=x.dtype, buffer=nl.sbuf)
    ncc.all_gather([load(x)], [dst], ncc.ReplicaGroup([[0, 1]]), collective_dim=1)
    return store(dst)


@clean(CASES, lambda r, xs: oracle.reduce_scatter([x for (x,) in xs], "minimum")[r], f32(4, 8), world_size=2)
def reduce_scatter_in_hbm(x):
    src, dst = hbm(x, (2, 8))
    ncc.reduce_scatter([src], [dst], ncc.ReplicaGroup([[0, 1]]), collective_dim=0, op=nl.minimum)
    return output(dst)


@clean(CASES, lambda r, xs: oracle.all_to_all([x for (x,) in xs])[r], f32(4, 8), world_size=2)
def all_to_all_in_hbm(x):
    src, dst = hbm(x)
    ncc.all_to_all([src], [dst], ncc.ReplicaGroup([[0, 1]]), collective_dim=0)
    return output(dst)


@clean(CASES, lambda r, xs: xs[r - 1][0], f32(4, 8), world_size=3)
def permute_around_a_circle(x):
    src, dst = hbm(x)
    ncc.collective_permute([src], [dst], [(0, 1), (1, 2), (2, 0)])
    return output(dst)


@clean(CASES, lambda r, xs: xs[r - 1][0] * 2, f32(4, 8), world_size=3)
def ring_on_two_channels(x):
    src, dst = hbm(x)
    src2, dst2 = hbm(x)
    ring = ncc.ReplicaGroup([[0, 1, 2]])
    ncc.collective_permute_implicit([[src], [src2]], [[dst], [dst2]], ring, channel_ids=[0, 1])
    a, b = load(dst), load(dst2)
    nisa.tensor_tensor(dst=a, data1=a, data2=b, op=nl.add)
    return store(a)


@clean(CASES, lambda r, xs: oracle.all_reduce([x for (x,) in xs], "add")[r], f32(128, 8), world_size=2, lnc=2)
def all_reduce_of_what_both_cores_wrote(x):
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dst = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.ds(nl.program_id(0) * 64, 64)
    nisa.dma_copy(dst=src[rows, :], src=x[rows, :])
    nisa.core_barrier(data=src, cores=(0, 1))
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1]]), op=nl.add)
    nisa.dma_copy(dst=out[rows, :], src=dst[rows, :])
    return out


def _gathered(rank, xs):
    result = np.zeros(16, np.float32)
    for r, (x, _) in enumerate(xs):
        result[4 * r : 4 * r + 2] = x[1:3]
    return result


@clean(CASES, _gathered, f32(8), array([[2] * 4, [1] * 4, [0] * 4], "uint32"), world_size=4, lnc=2)
def all_gather_v_of_four_ranks(x, metadata):
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dst = nl.ndarray((16,), dtype=x.dtype, buffer=nl.shared_hbm)
    counts = nl.ndarray(metadata.shape, dtype=metadata.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray((16,), dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=src, src=x)
        nisa.dma_copy(dst=counts, src=metadata)
        zeros = nl.zeros((1, 16), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=dst, src=zeros)
    nisa.core_barrier(data=src, cores=(0, 1))
    ncc.all_gather_v([src], [dst], ncc.ReplicaGroup([[0, 1, 2, 3]]), counts)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out, src=dst)
    return out
