"""The cost model on worlds and whole kernels: barriers, collectives, runs without data, reports."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch

import nki_parallel_attn.sim.collectives as ncc
import nki_parallel_attn.sim.isa as nisa
import nki_parallel_attn.sim.language as nl
from nki_parallel_attn.sim import CapacityError, NkiValidationError, ReplicaGroup, ShapeOnly, jit
from nki_parallel_attn.sim.cost_collectives import exchange_of
from nki_parallel_attn.sim.cost_constants import TRN2_COSTS, TRN3_COSTS, table

from .kernels.flash_attention import flash_attention
from .kernels.matmul import tiled_matmul
from .test_cost import DMA_RATE, DMA_START, GPSIMD, SCALAR, TENSOR, VECTOR, run, sbuf

# Cores and ranks.


def test_barrier_joins_the_cores_of_a_rank():
    @jit
    def kernel():
        shared = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        data = sbuf(128, 512, dtype=nl.float32)
        for _ in range(1 + 2 * nl.program_id(0)):
            nisa.tensor_scalar(dst=sbuf(128, 512), data=data, op0=nl.multiply, operand0=2.0)
        nisa.core_barrier(data=shared, cores=(0, 1), engine=nisa.engine.vector)
        nisa.tensor_scalar(dst=sbuf(128, 512), data=data, op0=nl.multiply, operand0=2.0)

    report = run(kernel, lnc=2)
    assert report.makespan_ns == pytest.approx(3 * 512 / VECTOR + TRN2_COSTS.barrier_ns + 512 / VECTOR)
    assert report.core(0, 0).engines["vector"].waits["arrival of vector"] == pytest.approx(2 * 512 / VECTOR)


def gather_after(source, delay):
    """An all-gather of 256 KiB that starts after `delay` instructions on Vector."""
    mine = nl.ndarray((128, 1024), dtype=nl.bfloat16, buffer=nl.private_hbm)
    all_of_them = nl.ndarray((256, 1024), dtype=nl.bfloat16, buffer=nl.private_hbm)
    tile = sbuf(128, 1024)
    for _ in range(delay):
        nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=mine, src=tile)
    ncc.all_gather([mine], [all_of_them], ReplicaGroup([[0, 1]]), 0)


def test_collective_starts_with_the_last_rank():
    shape = ShapeOnly((128, 1024), nl.bfloat16)
    report = run(jit(gather_after), [(shape, 0), (shape, 3)], world_size=2)
    stored = 3 * 1024 / VECTOR + DMA_START + 128 * 2048 / (DMA_RATE * 0.813)
    # Below 1 MB and on one chip: one step of a mesh, in which each rank receives the other's 256 KiB.
    assert report.makespan_ns == pytest.approx(stored + 1500.0 + 256 * 1024 / DMA_RATE)
    assert report.collective_bytes == {0: 256 * 1024, 1: 256 * 1024}
    assert report.core(0).engines["collective"].waits["data from dma"] == pytest.approx(stored)


def test_collective_algorithms():
    mib = 1 << 20
    on_chip = exchange_of("all_gather", range(4), [mib // 8], [mib // 2], 2, TRN2_COSTS)
    assert (on_chip.algorithm, on_chip.latency_ns, on_chip.sent) == ("mesh", 1500.0, 3 * mib // 8)
    assert on_chip.ns == pytest.approx(1500.0 + 3 * mib / 8 / (2 * DMA_RATE))
    node = exchange_of("all_gather", range(64), [mib // 8], [8 * mib], 2, TRN2_COSTS)
    # Recursive doubling over 16 chips, then within the chip; 60 of 64 chunks enter each chip at 512 B/ns.
    assert (node.algorithm, node.latency_ns) == ("halving", (4 + 1) * 1500.0)
    assert node.ns - node.latency_ns == pytest.approx(60 * mib / 8 / 512 + 63 * mib / 8 / (2 * DMA_RATE))
    large = exchange_of("reduce_scatter", range(64), [64 * mib], [mib], 2, TRN2_COSTS)
    assert (large.algorithm, large.latency_ns, large.sent) == ("ring", 32 * 1500.0, 63 * mib)
    strided = exchange_of("reduce_scatter", range(0, 64, 4), [64 * mib], [4 * mib], 2, TRN2_COSTS)
    assert (strided.algorithm, strided.latency_ns) == ("ring", 15 * 1500.0)
    small = exchange_of("all_reduce", range(4), [1024], [1024], 2, TRN2_COSTS)
    assert (small.algorithm, small.latency_ns) == ("one-step mesh", 1500.0)
    nodes = exchange_of("all_gather", range(128), [64], [8192], 2, TRN2_COSTS)
    assert nodes.latency_ns == 2 * 1500.0 + 15000.0
    swap = exchange_of("all_to_all", range(4), [4 * mib], [4 * mib], 2, TRN2_COSTS)
    assert (swap.sent, swap.ns) == (3 * mib, pytest.approx(1500.0 + 3 * mib / (2 * DMA_RATE)))
    ring = exchange_of("collective_permute_implicit", range(4), [mib], [mib], 2, TRN2_COSTS)
    assert (ring.sent, ring.ns) == (mib, pytest.approx(1500.0 + mib / (2 * DMA_RATE)))
    reduced = exchange_of("collective_permute_implicit_reduce", range(4), [mib, mib], [mib], 2, TRN2_COSTS)
    assert reduced.ns == pytest.approx(ring.ns + 2 * mib / (2 * DMA_RATE * 0.5))
    assert exchange_of("all_gather", [0], [mib], [mib], 2, TRN3_COSTS).sent == 0


@jit
def symmetric(source):
    """Load, all-gather, reduce: the same on every rank."""
    tile, mine = sbuf(128, 512), nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    world = nl.ndarray((512, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=source)
    nisa.dma_copy(dst=mine, src=tile)
    ncc.all_gather([mine], [world], ReplicaGroup([[0, 1, 2, 3]]), 0)
    for i in range(4):
        part = sbuf(128, 512)
        nisa.dma_copy(dst=part, src=world[i * 128 : (i + 1) * 128, :])
        nisa.tensor_tensor(dst=tile, data1=tile, data2=part, op=nl.add)
    out = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@pytest.mark.parametrize("lnc", [1, 2])
def test_one_rank_stands_for_a_symmetric_world(lnc):
    shape = ShapeOnly((128, 512), nl.bfloat16)
    kernel = symmetric if lnc == 1 else symmetric_on_two
    world = run(kernel, [(shape,)] * 4, world_size=4, lnc=lnc)
    alone = run(kernel, shape, world_size=4, lnc=lnc, representative=2)
    assert alone.makespan_ns == world.makespan_ns
    assert alone.cores == world.cores[2 * lnc : 3 * lnc]
    assert alone.collective_bytes == {2: world.collective_bytes[2]}


@jit
def symmetric_on_two(source):
    """Two cores gather halves of their own, meet, and exchange tiles."""
    core = nl.program_id(0)
    rows = slice(core * 64, core * 64 + 64)
    tile, other = sbuf(64, 512), sbuf(64, 512)
    mine = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    world = nl.ndarray((512, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=source[rows, :])
    nisa.dma_copy(dst=mine[rows, :], src=tile)
    nisa.core_barrier(data=mine, cores=(0, 1))
    ncc.all_gather([mine], [world], ReplicaGroup([[0, 1, 2, 3]]), 0)
    nisa.dma_copy(dst=tile, src=world[rows, :])
    nisa.sendrecv(src=tile, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=other, op=nl.add)
    out = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[rows, :], src=tile)
    return out


# With data and without.


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_flash_attention_is_charged_the_same_without_data(target):
    heads, d, seqlen = 1, 128, 1024
    q_t, v = torch.randn(heads, d, seqlen), torch.randn(heads, seqlen, d)
    with_data = run(flash_attention, q_t, q_t, v, target=target, compute=True)
    assert run(flash_attention, q_t.to("meta"), q_t.to("meta"), v.to("meta"), target=target) == with_data


def test_worlds_are_charged_the_same_without_data():
    shapes, values = ShapeOnly((128, 512), nl.bfloat16), torch.randn(128, 512).bfloat16()
    for kernel, lnc in ((symmetric, 1), (symmetric_on_two, 2)):
        with_data = run(kernel, [(values,)] * 4, world_size=4, lnc=lnc, compute=True)
        assert run(kernel, [(shapes,)] * 4, world_size=4, lnc=lnc) == with_data
    left, right = torch.randn(256, 256), torch.randn(256, 1024)
    shapes_of = [ShapeOnly(tuple(t.shape), t.dtype) for t in (left, right)]
    assert run(tiled_matmul, *shapes_of, lnc=2) == run(tiled_matmul, left, right, lnc=2, compute=True)


def test_transposed_loads_are_charged_the_same_without_data():
    def kernel(x):
        columns = sbuf(128, 4, 128)
        for k in range(4):
            nisa.dma_transpose(dst=columns[:, k, :], src=x[:, k * 128 : (k + 1) * 128])
        product = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
        for k in range(4):
            nisa.nc_matmul(product, columns[:, k, :], columns[:, k, :])

    x = torch.randn(128, 512).bfloat16()
    assert run(kernel, x.to("meta")) == run(kernel, x, compute=True)


def test_flash_attention_busy_times():
    heads, d, seqlen = 2, 128, 2048
    q_t, v = ShapeOnly((heads, d, seqlen), nl.float32), ShapeOnly((heads, seqlen, d), nl.float32)
    report = run(flash_attention, q_t, q_t, v)
    q_tiles = heads * seqlen // 128
    k_tiles = heads * sum(i // 4 + 1 for i in range(seqlen // 128))
    engines = report.core().engines
    # float32: 4 passes to multiply, 2 to transpose; four transposes and products with V for each tile of keys.
    products = k_tiles * (4 * 512 + 4 * (2 * 128 + 4 * 128))
    loads = k_tiles * (4 * 32 + 4 * (2 * 32 + 4 * 32))
    assert products / TENSOR <= engines["tensor"].busy_ns <= (products + loads) / TENSOR
    assert report.flops == k_tiles * 2 * 2 * 128 * 512 * d
    # A short exponential, and a long one whose sum is read out.
    assert engines["scalar"].busy_ns == pytest.approx(k_tiles * (164 + 512 + 64) / SCALAR)
    # Scale, maximum, three short ones, rescaling, four copies, and the sum of two; the maximum of a tile that was not
    # masked waits for the scaling just before. For each tile of queries: three initialisations, a short reciprocal, and
    # the division, which waits for it.
    tiles = k_tiles * (512 + 512 + 3 * 164 + 128 + 4 * 128 + 2 * 128) + (k_tiles - q_tiles) * 100
    ends = q_tiles * (164 + 164 + 128 + 164 + 228)
    assert engines["vector"].busy_ns == pytest.approx((tiles + ends) / VECTOR)
    assert engines["gpsimd"].busy_ns == pytest.approx(q_tiles * 512 / GPSIMD)
    for engine in engines.values():
        assert sum(engine.waits.values()) == pytest.approx(engine.idle_ns)


def test_no_data_is_allocated():
    @jit
    def kernel(source):
        out = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.shared_hbm)
        for i in range(64):
            tile = sbuf(128, 4096)
            nisa.dma_copy(dst=tile, src=source[:, i * 4096 : (i + 1) * 4096])
            nisa.dma_copy(dst=out[:, i * 4096 : (i + 1) * 4096], src=tile)
        return out

    tracemalloc.start()
    report = run(kernel, ShapeOnly((128, 64 * 4096 * 16), nl.bfloat16))  # 1 GiB
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.instructions == 128
    assert peak < 4 << 20


def test_unknown_numbers():
    @jit
    def kernel(lengths, table_hbm):
        register, length = nisa.register_alloc(), sbuf(1, 1, dtype=nl.int32)
        nisa.dma_copy(dst=length, src=lengths)
        nisa.register_load(register, length)
        tile = sbuf(128, 512)
        for _ in nl.dynamic_range(0, register):
            nisa.memset(dst=tile, value=0.0)
        nisa.dma_copy(dst=tile, src=table_hbm.ap(pattern=[[512, 128], [1, 512]], scalar_offset=length, indirect_dim=0))

    shapes = ShapeOnly((1, 1), nl.int32), ShapeOnly((4096, 512), nl.bfloat16)
    for value in (0, 3):
        report = run(kernel, *shapes, unknown_value=value)
        assert report.core().engines["vector"].instructions == value


def test_capacity_is_checked_without_data():
    @jit
    def kernel():
        tiles = [sbuf(128, 60_000) for _ in range(2)]
        for tile in tiles * 2:
            nisa.memset(dst=tile, value=0.0)

    with pytest.raises(CapacityError):
        run(kernel)


def test_peak_memory_counts_tensors_from_first_to_last_use():
    @jit
    def kernel():
        kept = sbuf(128, 100)
        nisa.memset(dst=kept, value=0.0)
        for _ in range(4):
            tile = sbuf(128, 1000)  # Python holds the one before while this one is made
            nisa.memset(dst=tile, value=0.0)
        nisa.tensor_copy(dst=kept, src=tile[:, 0:100])

    assert run(kernel).core().sbuf_peak_bytes == 2 * (100 + 1000)


def test_shapes_alone_do_not_compute():
    with pytest.raises(NkiValidationError, match="no data"):
        run(symmetric_on_two, ShapeOnly((128, 512), nl.bfloat16), lnc=2, compute=True)


def test_options_that_cannot_be():
    with pytest.raises(ValueError, match="trn1"):
        run(symmetric, target="trn1")
    with pytest.raises(ValueError, match="representative"):
        run(symmetric, world_size=4, representative=4)
    with pytest.raises(ValueError, match="without data"):
        run(symmetric, world_size=4, representative=True, compute=True)
    with pytest.raises(ValueError, match="trace=True"):
        run(jit(lambda: None)).write_trace("trace.json")


# The report.


def test_report_and_trace(tmp_path):
    shape = ShapeOnly((128, 512), nl.bfloat16)
    report = run(symmetric_on_two, [(shape,)] * 4, world_size=4, lnc=2, trace=True)
    text = str(report)
    assert "A model, not a measurement" in text and "rank 3 core 1" in text and "collective" in text
    values = json.loads(report.to_json())
    assert values["makespan_ns"] == report.makespan_ns and len(values["cores"]) == 8
    path = tmp_path / "trace.json"
    report.write_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    collectives = sum(event["name"].startswith("all_gather") for event in slices)
    # A collective is one slice on each rank, though both cores call it.
    assert collectives == 4 and len(slices) == report.instructions - 4
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(report.makespan_ns / 1000)
    assert {event["args"]["file"] for event in slices} == {__file__}
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert len(names) == 8


def test_documented_table_of_constants():
    assert table() in (Path(__file__).parents[2] / "docs" / "cost_model.md").read_text()
