"""The cost model on kernels small enough to compute by hand: engines, dependencies, DMA."""

from __future__ import annotations

import pytest

import nki_parallel_attn.sim.isa as nisa
import nki_parallel_attn.sim.language as nl
from nki_parallel_attn.sim import ShapeOnly, jit, profile
from nki_parallel_attn.sim.cost_constants import TRN2_COSTS
from nki_parallel_attn.sim.cost_dma import DMA_RULES, efficiency
from nki_parallel_attn.sim.cost_rules import RULES
from nki_parallel_attn.sim.instruction import INSTRUCTIONS
from nki_parallel_attn.sim.timeline import MEETING_RULES

# Clocks in GHz, latencies in ns and rates in B/ns, from the architecture guides: written again here on purpose.
TENSOR, VECTOR, SCALAR, GPSIMD = 2.4, 0.96, 1.2, 1.2
DMA_START = 1300.0
HBM_SHARE = 2900.0 / 8
DMA_RATE = 16 * 23.0


def run(kernel, *args, target="trn2", **options):
    return profile(kernel, target=target, **options)(*args)


def sbuf(*shape, dtype=nl.bfloat16):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def test_every_instruction_has_a_rule():
    assert set(INSTRUCTIONS) <= {*RULES, *DMA_RULES, *MEETING_RULES}


# Tensor Engine: max(columns, 64) cycles each, loads of 128 / 4 cycles hidden behind the multiplication before.


@pytest.mark.parametrize(
    ("columns", "dtype", "cycles", "load"),
    [
        (512, nl.bfloat16, 512, 32),
        (16, nl.bfloat16, 64, 32),
        (512, nl.float32, 4 * 512, 128),
        (16, nl.tfloat32, 64, 32),
    ],
)
def test_chain_of_matmuls(columns, dtype, cycles, load):
    @jit
    def kernel():
        stationary, moving, dst = sbuf(128, 128, dtype=dtype), sbuf(128, columns, dtype=dtype), psum(128, columns)
        for _ in range(20):
            nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, accumulate=False)

    report = run(kernel)
    assert report.makespan_ns == pytest.approx((load + 20 * cycles) / TENSOR)
    assert report.flops == 20 * 2 * 128 * 128 * columns
    assert report.bottleneck == (0, 0, "tensor")
    assert report.roofline == pytest.approx(1.0)


def test_double_row_contracts_twice_as_much_in_the_same_time():
    @jit
    def kernel():
        stationary, moving = sbuf(128, 2, 128, dtype=nl.float8_e4m3), sbuf(128, 2, 512, dtype=nl.float8_e4m3)
        nisa.nc_matmul(
            dst=psum(128, 512), stationary=stationary, moving=moving, perf_mode=nisa.matmul_perf_mode.double_row
        )

    report = run(kernel)
    assert report.makespan_ns == pytest.approx((32 + 512) / TENSOR)
    assert report.flops == 2 * 256 * 128 * 512


def test_a_long_load_limits_short_matmuls():
    @jit
    def kernel():
        stationary, moving, dst = sbuf(128, 128, dtype=nl.float32), sbuf(128, 4, dtype=nl.float32), psum(128, 4)
        for _ in range(10):
            nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, accumulate=False, is_moving_onezero=True)

    # Two passes: 2 * 64 cycles to multiply, 2 * 128 / 4 to load.
    assert run(kernel).makespan_ns == pytest.approx((64 + 10 * 128) / TENSOR)


@pytest.mark.parametrize(("dtype", "passes"), [(nl.bfloat16, 1), (nl.float32, 2)])
def test_transposes_do_no_useful_work(dtype, passes):
    @jit
    def kernel():
        data, dst = sbuf(128, 128, dtype=dtype), psum(128, 128, dtype=dtype)
        for _ in range(5):
            nisa.nc_transpose(dst=dst, data=data)

    report = run(kernel)
    assert report.makespan_ns == pytest.approx(passes * (32 + 5 * 128) / TENSOR)
    assert report.flops == 0


# Vector, Scalar and GpSimd Engine.


def vector_cycles(instruct, target="trn2"):
    report = run(jit(instruct), target=target)
    return report.core().engines["vector"].busy_ns * (0.96 if target == "trn2" else 1.2)


@pytest.mark.parametrize(
    ("source", "target_tile", "target", "cycles"),
    [
        (lambda: sbuf(128, 512), lambda: sbuf(128, 512), "trn2", 128),
        (lambda: sbuf(128, 512), lambda: sbuf(128, 512, dtype=nl.float16), "trn2", 128),
        (lambda: sbuf(128, 1024)[:, 0:1024:2], lambda: sbuf(128, 512), "trn2", 256),
        (lambda: psum(128, 512, dtype=nl.bfloat16), lambda: sbuf(128, 512), "trn2", 256),
        (lambda: psum(128, 512), lambda: sbuf(128, 512), "trn2", 512),
        (lambda: sbuf(128, 512, dtype=nl.float32), lambda: sbuf(128, 512, dtype=nl.float32), "trn2", 512),
        (lambda: sbuf(128, 512, dtype=nl.float8_e4m3), lambda: sbuf(128, 512, dtype=nl.float8_e4m3), "trn2", 512),
        (lambda: sbuf(128, 512, dtype=nl.float8_e4m3), lambda: sbuf(128, 512, dtype=nl.float8_e4m3), "trn3", 128),
        (lambda: sbuf(128, 128), lambda: sbuf(128, 128), "trn2", 64),
        (lambda: sbuf(128, 32), lambda: sbuf(128, 32), "trn2", 164),
        (lambda: sbuf(128, 8 * 512, dtype=nl.float32)[:, 0:4096:8], lambda: sbuf(128, 512), "trn2", 1024),
        (lambda: sbuf(8, 512), lambda: sbuf(8, 512), "trn2", 128),
    ],
    ids=[
        "contiguous", "two formats", "strided", "from PSUM", "float32 PSUM", "float32", "fp8", "fp8 on trn3", "floor",
        "short", "wide stride", "few partitions",
    ],
)  # fmt: skip
def test_copies_on_vector(source, target_tile, target, cycles):
    assert vector_cycles(lambda: nisa.tensor_copy(dst=target_tile(), src=source()), target) == pytest.approx(cycles)


@pytest.mark.parametrize(("dtype", "cycles"), [(nl.bfloat16, 512), (nl.float32, 1024)])
def test_two_inputs_on_vector(dtype, cycles):
    def instruct():
        nisa.tensor_tensor(dst=sbuf(128, 512, dtype=dtype), data1=sbuf(128, 512, dtype=dtype),
                           data2=sbuf(128, 512, dtype=dtype), op=nl.add)  # fmt: skip

    assert vector_cycles(instruct) == pytest.approx(cycles)


def test_reciprocal_takes_eight_cycles_an_element():
    assert vector_cycles(lambda: nisa.reciprocal(dst=sbuf(128, 512), data=sbuf(128, 512))) == pytest.approx(8 * 512)


def test_vector_exponential_is_four_times_as_fast():
    cycles = vector_cycles(lambda: nisa.exponential(dst=sbuf(128, 512), src=sbuf(128, 512)), "trn3")
    assert cycles == pytest.approx(128)


def test_scalar_reads_its_accumulator_out():
    @jit
    def kernel(reads):
        nisa.activation(
            dst=sbuf(128, 512), op=nl.exp, data=sbuf(128, 512), reduce_op=nl.add,
            reduce_cmd=nisa.reduce_cmd.reset_reduce, reduce_res=sbuf(128, 1, dtype=nl.float32) if reads else None,
        )  # fmt: skip

    assert run(kernel, False).makespan_ns == pytest.approx(512 / SCALAR)
    assert run(kernel, True).makespan_ns == pytest.approx((512 + 64) / SCALAR)


def test_gpsimd():
    @jit
    def kernel():
        nisa.iota(dst=sbuf(128, 512, dtype=nl.int32), pattern=[[1, 512]])
        nisa.tensor_scalar(
            dst=sbuf(128, 512, dtype=nl.float32), data=sbuf(128, 512, dtype=nl.float32), op0=nl.rsqrt, operand0=0.0,
            engine=nisa.engine.gpsimd,
        )  # fmt: skip

    assert run(kernel).makespan_ns == pytest.approx((512 + 4 * 512) / GPSIMD)


# Overlap and stalls.


def test_independent_engines_overlap():
    @jit
    def kernel():
        data = sbuf(128, 512, dtype=nl.float32)
        for _ in range(10):
            nisa.tensor_scalar(dst=sbuf(128, 512), data=data, op0=nl.multiply, operand0=2.0)
            nisa.activation(dst=sbuf(128, 512), op=nl.exp, data=data)

    report = run(kernel)
    assert report.makespan_ns == pytest.approx(max(10 * 512 / VECTOR, 10 * 512 / SCALAR))
    assert report.core().engines["scalar"].waits == {"finished": pytest.approx(10 * 512 * (1 / VECTOR - 1 / SCALAR))}


def test_a_dependency_stalls():
    @jit
    def kernel():
        tiles = [sbuf(128, 512, dtype=nl.float32) for _ in range(4)]
        nisa.tensor_scalar(dst=tiles[1], data=tiles[0], op0=nl.multiply, operand0=2.0)
        nisa.activation(dst=tiles[2], op=nl.exp, data=tiles[1])
        nisa.tensor_scalar(dst=tiles[3], data=tiles[2], op0=nl.multiply, operand0=2.0)

    report = run(kernel)
    assert report.makespan_ns == pytest.approx(2 * 512 / VECTOR + 512 / SCALAR)
    waits = report.core().engines["vector"].waits
    assert waits["data from scalar"] == pytest.approx(512 / SCALAR)
    assert report.core().engines["scalar"].waits["data from vector"] == pytest.approx(512 / VECTOR)


def test_waiting_for_the_instruction_before_costs_100_cycles():
    @jit
    def kernel():
        tiles = [sbuf(128, 512, dtype=nl.float32) for _ in range(4)]
        for i in range(3):
            nisa.tensor_scalar(dst=tiles[i + 1], data=tiles[i], op0=nl.multiply, operand0=2.0)

    assert run(kernel).makespan_ns == pytest.approx((512 + 2 * 612) / VECTOR)


def test_a_write_waits_for_readers():
    @jit
    def kernel():
        tile, other = sbuf(128, 512, dtype=nl.float32), sbuf(128, 512, dtype=nl.float32)
        nisa.activation(dst=other, op=nl.exp, data=tile)
        nisa.memset(dst=tile, value=0.0)

    report = run(kernel)
    assert report.makespan_ns == pytest.approx(512 / SCALAR + 512 / VECTOR)
    assert report.core().engines["vector"].waits["space held by scalar"] == pytest.approx(512 / SCALAR)


def test_parts_of_a_tile_are_independent():
    @jit
    def kernel():
        tile, other = sbuf(128, 1024, dtype=nl.float32), sbuf(128, 512, dtype=nl.float32)
        nisa.activation(dst=other, op=nl.exp, data=tile[:, 0:512])
        nisa.memset(dst=tile[:, 512:1024], value=0.0)
        nisa.activation(dst=other[0:64, :], op=nl.exp, data=tile[0:64, 512:1024])
        nisa.memset(dst=tile[64:128, 512:1024], value=0.0)

    # The third waits for half of the second's tile; the fourth for nothing but its engine.
    scalar_end = max(512 / SCALAR, 512 / VECTOR) + 512 / SCALAR
    assert run(kernel).makespan_ns == pytest.approx(max(scalar_end, 2 * 512 / VECTOR))


def test_new_psum_tiles_wait_for_old_ones_to_be_read():
    @jit
    def kernel():
        stationary, moving = sbuf(128, 128), sbuf(128, 512)
        for _ in range(24):
            product = psum(128, 512)
            nisa.nc_matmul(dst=product, stationary=stationary, moving=moving, accumulate=False)
            nisa.tensor_copy(dst=sbuf(128, 512), src=product)
            del product

    report = run(kernel)
    assert report.makespan_ns == pytest.approx((32 + 512) / TENSOR + 24 * 512 / VECTOR)
    # Matmul n takes the bank that copy n - 8 has left; before that, no wait.
    stalls = (32 + 512) / TENSOR + 16 * 512 / VECTOR - (32 + 23 * 512) / TENSOR
    assert report.core().engines["tensor"].waits["space held by vector"] == pytest.approx(stalls)
    assert report.core().psum_peak_bytes == 2048


# DMA.


@pytest.mark.parametrize(("target", "rate"), [("trn2", min(DMA_RATE, HBM_SHARE)), ("trn3", 16 * 33.0)])
def test_dma_stream_runs_at_the_documented_rate(target, rate):
    count, row = 5, 16384

    @jit
    def kernel(source):
        for i in range(count):
            nisa.dma_copy(dst=sbuf(128, row), src=source[i])

    report = run(kernel, ShapeOnly((count, 128, row), nl.bfloat16), target=target)
    total = count * 128 * row * 2
    assert report.makespan_ns == pytest.approx(DMA_START + total / rate)
    assert report.dma_bytes == report.core().hbm_read_bytes == total
    assert report.core().hbm_written_bytes == 0
    assert report.core().engines["dma"].waits == {"DMA start-up": pytest.approx(DMA_START), "finished": 0.0}


@pytest.mark.parametrize(("row_bytes", "share"), [(256, 0.103), (1024, 0.422), (4096, 0.966), (3072, 0.8895)])
def test_short_descriptors_waste_the_rate(row_bytes, share):
    @jit
    def kernel(source):
        nisa.dma_copy(dst=sbuf(128, row_bytes // 2), src=source)

    report = run(kernel, ShapeOnly((128, row_bytes // 2), nl.bfloat16))
    assert efficiency(row_bytes, TRN2_COSTS) == pytest.approx(share)
    assert report.makespan_ns == pytest.approx(DMA_START + 128 * row_bytes / (DMA_RATE * share))


def test_few_partitions_use_few_engines():
    @jit
    def kernel(source):
        for i in range(2):
            nisa.dma_copy(dst=sbuf(4, 16384), src=source[i])

    # The example of the introduction to DMA: 4 partitions are one engine's.
    report = run(kernel, ShapeOnly((2, 4, 16384), nl.bfloat16))
    assert report.makespan_ns == pytest.approx(DMA_START + 2 * 4 * 32768 / 23.0)


def test_transfers_to_other_columns_overlap():
    @jit
    def kernel(same):
        out = nl.ndarray((128, 4096), dtype=nl.float32, buffer=nl.shared_hbm)
        for i in range(2):
            start = 0 if same else i * 1024
            nisa.dma_copy(dst=out[:, start : start + 1024], src=sbuf(128, 1024, dtype=nl.float32))
        return out

    moved = 128 * 4096 / (DMA_RATE * 0.966)
    assert run(kernel, False).makespan_ns == pytest.approx(DMA_START + 2 * moved)
    assert run(kernel, True).makespan_ns == pytest.approx(2 * (DMA_START + moved))


def test_gathers_keep_gpsimd_busy():
    @jit
    def kernel(table_hbm):
        index = sbuf(128, 1, dtype=nl.uint32)
        rows = table_hbm.ap(pattern=[[1024, 128], [1, 1024]], vector_offset=index, indirect_dim=0)
        nisa.dma_copy(dst=sbuf(128, 1024), src=rows)

    report = run(kernel, ShapeOnly((512, 1024), nl.bfloat16))
    made = 128 / GPSIMD
    assert report.core().engines["gpsimd"].busy_ns == pytest.approx(made)
    assert report.makespan_ns == pytest.approx(made + DMA_START + 128 * 2048 / (DMA_RATE * 0.813))


def test_hardware_descriptors_take_600_ns_of_their_sequencer():
    @jit
    def kernel(source, trigger):
        for i in range(4):
            nisa.dma_copy(dst=sbuf(8, 2048), src=source[i], dge_mode=nisa.dge_mode.hwdge, engine=trigger)

    last = DMA_START + 8 * 4096 / (23.0 * 0.966)
    shape = ShapeOnly((4, 8, 2048), nl.bfloat16)
    for trigger, count in ((nisa.engine.sync, 4), (nisa.engine.unknown, 2)):
        transfers = max(count * 600.0 + last, 600.0 + DMA_START + 4 * 8 * 4096 / (23.0 * 0.966))
        assert run(kernel, shape, trigger).makespan_ns == pytest.approx(transfers)
