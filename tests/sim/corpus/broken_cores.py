"""Kernels that break a rule of LNC cores or of collectives."""

from __future__ import annotations

from nki_parallel_attn.sim import collectives as ncc
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim.errors import DeadlockError, DivergenceError, OutOfBoundsError, ReplicaGroupError

from .cases import Case, array, broken, f32, rows_by_rank
from .kernel_helpers import load, store, tile

CASES: list[Case] = []
PAIR = [[0, 1]]


def hbm(x, shape=None, dtype=None):
    """A private HBM copy of x, and an unwritten private tensor for the result."""
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm)
    nisa.dma_copy(dst=src, src=x)
    return src, nl.ndarray(shape or x.shape, dtype=dtype or x.dtype, buffer=nl.hbm)


@broken(CASES, "lnc", f32(2, 8))
def barrier_of_one_core(x):
    shared = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.core_barrier(data=shared, cores=(0, 1))  # <- breaks


@broken(CASES, "core-barrier-cores", f32(2, 8), lnc=2)
def barrier_of_three_cores(x):
    shared = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.core_barrier(data=shared, cores=(0, 1, 2))  # <- breaks


@broken(CASES, "core-barrier-data", f32(2, 8), lnc=2)
def barrier_on_private_data(x):
    private = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    nisa.core_barrier(data=private, cores=(0, 1))  # <- breaks


@broken(CASES, "core-barrier-data", lnc=2)
def barrier_on_two_tensors():
    tensors = [nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.shared_hbm) for _ in range(2)]
    nisa.core_barrier(data=tensors[nl.program_id(0)], cores=(0, 1))  # <- breaks


@broken(CASES, "kernel-output", f32(2, 8), lnc=2)
def cores_that_return_different_tensors(x):
    outs = [nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm) for _ in range(2)]
    if nl.program_id(0) == 0:
        for out in outs:
            nisa.dma_copy(dst=out, src=x)
    return outs[nl.program_id(0)]


@broken(CASES, "kernel-output", f32(2, 8), lnc=2)
def core_that_returns_nothing(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 1:
        return None
    nisa.dma_copy(dst=out, src=x)
    return (out,)


@broken(CASES, "kernel-output", f32(2, 8), lnc=2)
def cores_that_return_different_views(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out, src=x)
    return {"out": [out[0:1] if nl.program_id(0) else out, 3]}


@broken(CASES, "sendrecv-rank", f32(2, 8), lnc=2)
def send_to_core_two(x):
    t, r = load(x), nl.ndarray(x.shape, dtype=x.dtype)
    nisa.sendrecv(src=t, dst=r, send_to_rank=2, recv_from_rank=1, pipe_id=0)  # <- breaks


@broken(CASES, "sendrecv-size", lnc=2)
def gpsimd_exchange_of_two_kib():
    other = 1 - nl.program_id(0)
    t, r = tile((128, 512)), nl.ndarray((128, 512), dtype=nl.float32)
    nisa.sendrecv(t, r, other, other, pipe_id=0, dma_engine=nisa.dma_engine.gpsimd_dma)  # <- breaks


@broken(CASES, "matching-dtype", lnc=2)
def exchange_that_casts():
    other = 1 - nl.program_id(0)
    r = nl.ndarray((128, 8), dtype=nl.bfloat16)
    nisa.sendrecv(src=tile((128, 8)), dst=r, send_to_rank=other, recv_from_rank=other, pipe_id=0)  # <- breaks


@broken(CASES, None, f32(2, 8), error=DeadlockError, lnc=2)
def barrier_that_one_core_skips(x):
    shared = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.core_barrier(data=shared, cores=(0, 1))  # <- breaks


@broken(CASES, "collective-memory-mix", f32(4, 8), world_size=2)
def gather_from_hbm_into_sbuf(x):
    src, _ = hbm(x)
    dst = nl.ndarray((8, 8), dtype=x.dtype, buffer=nl.sbuf)
    ncc.all_gather([src], [dst], ncc.ReplicaGroup(PAIR), collective_dim=0)  # <- breaks


@broken(CASES, "collective-hbm-only", f32(4, 8), world_size=2)
def all_to_all_in_sbuf(x):
    src, dst = load(x), nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    ncc.all_to_all([src], [dst], ncc.ReplicaGroup(PAIR), collective_dim=0)  # <- breaks


@broken(CASES, "collective-sbuf-coalesced", f32(4, 8), world_size=2)
def two_sbuf_tensors_in_one_call(x):
    a, b = load(x), nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    ncc.all_reduce([a, a], [b, b], ncc.ReplicaGroup(PAIR), op=nl.add)  # <- breaks


@broken(CASES, "collective-sbuf-rank", f32(4, 2, 8), world_size=2)
def three_dims_in_sbuf(x):
    src, dst = load(x), nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup(PAIR), op=nl.add)  # <- breaks


@broken(CASES, "collective-dim", f32(4, 8), world_size=2)
def gather_along_columns_in_hbm(x):
    src, dst = hbm(x, (4, 16))
    ncc.all_gather([src], [dst], ncc.ReplicaGroup(PAIR), collective_dim=1)  # <- breaks


@broken(CASES, "collective-op", f32(4, 8), world_size=2)
def product_over_ranks(x):
    src, dst = hbm(x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup(PAIR), op=nl.multiply)  # <- breaks


@broken(CASES, "collective-shape", f32(4, 8), world_size=2)
def gather_into_too_small_a_tensor(x):
    src, dst = hbm(x, (6, 8))
    ncc.all_gather([src], [dst], ncc.ReplicaGroup(PAIR), collective_dim=0)  # <- breaks


@broken(CASES, "collective-shape", f32(3, 8), world_size=2)
def scatter_of_an_odd_number_of_rows(x):
    src, dst = hbm(x, (1, 8))
    ncc.reduce_scatter([src], [dst], ncc.ReplicaGroup(PAIR), collective_dim=0, op=nl.add)  # <- breaks


@broken(CASES, "collective-dtype", f32(4, 8), world_size=2)
def reduction_that_casts(x):
    src, dst = hbm(x, dtype=nl.bfloat16)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup(PAIR), op=nl.add)  # <- breaks


@broken(CASES, "collective-list", f32(4, 8), world_size=2)
def more_sources_than_destinations(x):
    src, dst = hbm(x)
    ncc.all_reduce([src, src], [dst], ncc.ReplicaGroup(PAIR), op=nl.add)  # <- breaks


@broken(CASES, "collective-channels", f32(4, 8), world_size=2)
def channels_that_start_at_one(x):
    src, dst = hbm(x)
    ncc.collective_permute_implicit([[src]], [[dst]], ncc.ReplicaGroup(PAIR), channel_ids=[1])  # <- breaks


@broken(CASES, "collective-single", f32(4, 8), world_size=2)
def permute_of_two_tensors(x):
    src, dst = hbm(x)
    ncc.collective_permute([src, src], [dst, dst], [(0, 1), (1, 0)])  # <- breaks


@broken(CASES, "collective-permute-pattern", f32(4, 8), world_size=2)
def permute_that_is_no_circle(x):
    src, dst = hbm(x)
    ncc.collective_permute([src], [dst], [(0, 1)])  # <- breaks


@broken(CASES, "collective-kernel-io", f32(4, 8), world_size=2)
def collective_on_an_argument(x):
    _, dst = hbm(x)
    ncc.all_reduce([x], [dst], ncc.ReplicaGroup(PAIR), op=nl.add)  # <- breaks


@broken(CASES, "all-gather-v", f32(8), array([[2, 0], [0, 0], [0, 0]], "uint32"), world_size=2, lnc=2)
def all_gather_v_of_two_ranks(x, metadata):
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dst = nl.ndarray((16,), dtype=x.dtype, buffer=nl.shared_hbm)
    counts = nl.ndarray(metadata.shape, dtype=metadata.dtype, buffer=nl.shared_hbm)
    ncc.all_gather_v([src], [dst], ncc.ReplicaGroup(PAIR), counts)  # <- breaks


@broken(CASES, "collective-v-metadata", f32(8), array([[2] * 4, [0] * 4, [0] * 4], "int32"), world_size=4, lnc=2)
def signed_metadata(x, metadata):
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dst = nl.ndarray((32,), dtype=x.dtype, buffer=nl.shared_hbm)
    counts = nl.ndarray(metadata.shape, dtype=metadata.dtype, buffer=nl.shared_hbm)
    ncc.all_gather_v([src], [dst], ncc.ReplicaGroup([[0, 1, 2, 3]]), counts)  # <- breaks


@broken(
    CASES,
    "collective-v-bounds",
    f32(8),
    array([[9] * 4, [0] * 4, [0] * 4], "uint32"),
    error=OutOfBoundsError,
    world_size=4,
    lnc=2,
)
def more_elements_than_the_source_has(x, metadata):
    src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dst = nl.ndarray((64,), dtype=x.dtype, buffer=nl.shared_hbm)
    counts = nl.ndarray(metadata.shape, dtype=metadata.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=src, src=x)
        nisa.dma_copy(dst=counts, src=metadata)
    nisa.core_barrier(data=src, cores=(0, 1))
    ncc.all_gather_v([src], [dst], ncc.ReplicaGroup([[0, 1, 2, 3]]), counts)  # <- breaks


@broken(CASES, None, f32(4, 8), error=ReplicaGroupError, world_size=2)
def rank_in_two_lists(x):
    src, dst = hbm(x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1], [1, 0]]), op=nl.add)


@broken(CASES, None, f32(4, 8), error=ReplicaGroupError, world_size=2)
def rank_outside_the_world(x):
    src, dst = hbm(x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 5]]), op=nl.add)  # <- breaks


@broken(CASES, None, f32(4, 8), error=ReplicaGroupError, world_size=2)
def rank_outside_its_group(x):
    src, dst = hbm(x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[1]]), op=nl.add)  # <- breaks


@broken(CASES, None, f32(4, 8), rows_by_rank(1), error=DivergenceError, world_size=2)
def ranks_that_reduce_differently(x, branch):
    src, dst = hbm(x)
    op = nl.maximum if branch.shape[0] == 1 else nl.minimum
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup(PAIR), op=op)  # <- breaks


@broken(CASES, None, rows_by_rank(8), error=DivergenceError, world_size=2)
def ranks_with_different_shapes(x):
    src, dst = hbm(x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup(PAIR), op=nl.add)  # <- breaks


@broken(CASES, None, f32(4, 8), rows_by_rank(1), error=DivergenceError, world_size=2)
def ranks_in_different_collectives(x, branch):
    src, dst = hbm(x)
    if branch.shape[0] == 1:
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup(PAIR), op=nl.add)  # <- breaks
    else:
        ncc.all_to_all([src], [dst], ncc.ReplicaGroup(PAIR), collective_dim=0)


@broken(CASES, None, f32(4, 8), rows_by_rank(1), error=DivergenceError, world_size=2)
def rank_that_skips_the_collective(x, branch):
    src, dst = hbm(x)
    if branch.shape[0] == 1:
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup(PAIR), op=nl.add)  # <- breaks
    return store(load(x))
