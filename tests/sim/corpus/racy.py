"""Kernels with a race between two LNC cores, or between a core and a collective, each with its synchronised twin.

`racy` and `synchronised` differ only in what orders the accesses. Every kernel takes x [128, 8] float32 at LNC 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nki_parallel_attn.sim import collectives as ncc
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .kernel_helpers import load

SHAPE = (128, 8)
BOTH = (0, 1)


@dataclass(frozen=True)
class Pair:
    """A kernel that races and the same kernel with the missing synchronisation."""

    racy: Callable[..., Any]
    synchronised: Callable[..., Any]
    world_size: int = 1

    @property
    def name(self) -> str:
        return self.racy.__name__


PAIRS: list[Pair] = []


def pair(world_size: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Split `kernel(x, synchronise)` into a racy and a synchronised kernel of x."""

    def add(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def racy(x):
            return kernel(x, False)

        def synchronised(x):
            return kernel(x, True)

        racy.__name__, synchronised.__name__ = kernel.__name__, kernel.__name__ + "_synchronised"
        PAIRS.append(Pair(racy, synchronised, world_size))
        return kernel

    return add


def shared(dtype: Any = nl.float32, shape: tuple[int, ...] = SHAPE) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def half(core: int) -> Any:
    return nl.ds(core * 64, 64)


def write_own_half(dst: Any, x: Any) -> None:
    rows = half(nl.program_id(0))
    nisa.dma_copy(dst=dst[rows, :], src=load(x[rows, :]))


@pair()
def both_cores_write_everything(x, synchronise):
    out = shared()
    if synchronise:
        write_own_half(out, x)
    else:
        nisa.dma_copy(dst=out, src=load(x))
    return out


@pair()
def halves_that_share_one_row(x, synchronise):
    out = shared()
    core = nl.program_id(0)
    first, last = (0, 64 if synchronise else 65) if core == 0 else (64, 128)
    nisa.dma_copy(dst=out[first:last, :], src=x[first:last, :])
    return out


@pair()
def columns_that_overlap_by_one(x, synchronise):
    out = shared()
    columns = slice(0, 8, 2) if nl.program_id(0) == 0 else slice(1, 8, 2) if synchronise else slice(4, 8)
    nisa.dma_copy(dst=out[:, columns], src=x[:, columns])
    return out


@pair()
def read_of_the_other_half_without_a_barrier(x, synchronise):
    scratch, out = shared(), shared()
    core = nl.program_id(0)
    write_own_half(scratch, x)
    if synchronise:
        nisa.core_barrier(data=scratch, cores=BOTH)
    nisa.dma_copy(dst=out[half(core), :], src=load(scratch[half(1 - core), :]))
    return out


@pair()
def barrier_before_the_write(x, synchronise):
    scratch, out = shared(), shared()
    core = nl.program_id(0)
    if not synchronise:
        nisa.core_barrier(data=scratch, cores=BOTH)
    write_own_half(scratch, x)
    if synchronise:
        nisa.core_barrier(data=scratch, cores=BOTH)
    nisa.dma_copy(dst=out[half(core), :], src=load(scratch[half(1 - core), :]))
    return out


@pair()
def overwrite_of_what_the_other_core_still_reads(x, synchronise):
    scratch, out = shared(), shared()
    core = nl.program_id(0)
    write_own_half(scratch, x)
    nisa.core_barrier(data=scratch, cores=BOTH)
    nisa.dma_copy(dst=out[half(core), :], src=load(scratch[half(1 - core), :]))
    if synchronise:
        nisa.core_barrier(data=scratch, cores=BOTH)
    write_own_half(scratch, x)
    return out


@pair()
def double_buffer_with_one_barrier_too_few(x, synchronise):
    scratch, out = shared(), shared()
    core = nl.program_id(0)
    for step in range(3):
        write_own_half(scratch, x)
        if synchronise or step != 1:
            nisa.core_barrier(data=scratch, cores=BOTH)
        received = load(scratch[half(1 - core), :])
        if synchronise or step != 1:
            nisa.core_barrier(data=scratch, cores=BOTH)
    nisa.dma_copy(dst=out[half(core), :], src=received)
    return out


@pair()
def read_before_the_exchange_instead_of_after(x, synchronise):
    scratch, out = shared(), shared()
    core = nl.program_id(0)
    token, received = load(x[0:1, :]), nl.ndarray((1, 8), dtype=nl.float32, buffer=nl.sbuf)
    write_own_half(scratch, x)
    if synchronise:
        nisa.sendrecv(token, received, 1 - core, 1 - core, pipe_id=0)
    other = load(scratch[half(1 - core), :])
    if not synchronise:
        nisa.sendrecv(token, received, 1 - core, 1 - core, pipe_id=0)
    nisa.dma_copy(dst=out[half(core), :], src=other)
    return out


@pair()
def scatter_to_rows_of_the_other_core(x, synchronise):
    out = shared()
    core = nl.program_id(0)
    rows = nl.ndarray((64, 1), dtype=nl.int32, buffer=nl.sbuf)
    # Rows core, core + 2, ... are disjoint; with the same offset both cores write the even rows.
    nisa.iota(rows, [[0, 1]], offset=core if synchronise else 0, channel_multiplier=2)
    dst = out.ap(pattern=[[8, 64], [1, 8]], vector_offset=rows, indirect_dim=0)
    nisa.dma_copy(dst=dst, src=load(x[half(core), :]))
    return out


@pair()
def dma_sum_into_the_same_rows(x, synchronise):
    total, out = shared(), shared()
    core = nl.program_id(0)
    if core == 0:
        nisa.dma_copy(dst=total, src=x)
    nisa.core_barrier(data=total, cores=BOTH)
    for turn in range(2):
        if core == turn:
            nisa.dma_compute(dst=total, srcs=[total, x], reduce_op=nl.add)
        if synchronise:
            nisa.core_barrier(data=total, cores=BOTH)
    nisa.dma_copy(dst=out[half(core), :], src=total[half(core), :])
    return out


@pair()
def register_from_what_the_other_core_writes(x, synchronise):
    count, out = shared(nl.int32, (1, 1)), shared()
    core = nl.program_id(0)
    if core == 0:
        one = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=one, value=1)
        nisa.dma_copy(dst=count, src=one)
    if synchronise:
        nisa.core_barrier(data=count, cores=BOTH)
    if core == 1:
        nisa.register_load(nisa.register_alloc(), count)
    write_own_half(out, x)
    return out


@pair()
def one_core_reads_while_the_other_prepares(x, synchronise):
    scratch, out = shared(), shared()
    core = nl.program_id(0)
    if core == 0:
        nisa.dma_copy(dst=scratch, src=x)
    if synchronise:
        nisa.core_barrier(data=scratch, cores=BOTH)
    nisa.dma_copy(dst=out[half(core), :], src=scratch[half(core), :])
    return out


@pair(world_size=2)
def collective_on_a_half_that_is_being_written(x, synchronise):
    src, dst, out = shared(), shared(), shared()
    write_own_half(src, x)
    if synchronise:
        nisa.core_barrier(data=src, cores=BOTH)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1]]), op=nl.add)
    nisa.dma_copy(dst=out[half(nl.program_id(0)), :], src=dst[half(nl.program_id(0)), :])
    return out


@pair(world_size=2)
def result_of_a_collective_used_as_scratch_before(x, synchronise):
    src, dst, out = shared(), shared(), shared()
    core = nl.program_id(0)
    write_own_half(src, x)
    if core == 1:
        nisa.dma_copy(dst=dst, src=x)
    if synchronise:
        nisa.core_barrier(data=dst, cores=BOTH)
    ncc.all_gather([src[half(0), :]], [dst], ncc.ReplicaGroup([[0, 1]]), collective_dim=0)
    nisa.dma_copy(dst=out[half(core), :], src=dst[half(core), :])
    return out


@pair(world_size=2)
def second_collective_overwrites_what_the_other_core_reads(x, synchronise):
    src, dst, out = shared(), shared(), shared()
    core = nl.program_id(0)
    write_own_half(src, x)
    nisa.core_barrier(data=src, cores=BOTH)
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_reduce([src], [dst], group, op=nl.add)
    nisa.dma_copy(dst=out[half(core), :], src=dst[half(core), :])
    if synchronise:
        nisa.core_barrier(data=dst, cores=BOTH)
    ncc.all_reduce([src], [dst], group, op=nl.maximum)
    return out


@pair(world_size=2)
def collectives_of_each_core_into_one_place(x, synchronise):
    src, dst, out = shared(), shared(), shared()
    core = nl.program_id(0)
    write_own_half(src, x)
    place = half(core if synchronise else 0)
    ncc.all_reduce([src[half(core), :]], [dst[place, :]], ncc.ReplicaGroup([[0, 1]]), op=nl.add)
    nisa.dma_copy(dst=out[half(core), :], src=dst[place, :])
    return out
