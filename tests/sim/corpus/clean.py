"""Clean kernels of one core and one rank: the rules' limits, reached and not passed."""

from __future__ import annotations

import numpy as np

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from ..oracle import dma, dtypes, gpsimd, scalar, vector
from .cases import Case, array, clean, f32
from .kernel_helpers import evict, load, store, tile

CLEAN: list[Case] = []


def bf16(x):
    return dtypes.round_to(x, "bfloat16")


@clean(CLEAN, lambda x, y: x + y, f32(128, 512), f32(128, 512))
def addition_on_all_partitions(x, y):
    a, b = load(x), load(y)
    c = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=c, data1=a, data2=b, op=nl.add)
    return store(c)


@clean(CLEAN, lambda x, y: x.T @ y, f32(128, 128), f32(128, 512))
def matmul_that_fills_a_bank(x, y):
    p = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=p, stationary=load(x), moving=load(y))
    return evict(p)


@clean(CLEAN, lambda x, y: x.T @ y, f32(512, 128), f32(512, 64))
def matmul_accumulated_over_four_tiles(x, y):
    p = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)
    for i in range(4):
        rows = slice(i * 128, (i + 1) * 128)
        nisa.nc_matmul(dst=p, stationary=load(x[rows]), moving=load(y[rows]), accumulate=i > 0)
    return evict(p)


@clean(CLEAN, lambda x, y: x.T @ y, f32(256, 32), f32(256, 32))
def accumulation_found_by_itself_on_a_zeroed_bank(x, y):
    p = nl.zeros((32, 32), dtype=nl.float32, buffer=nl.psum)
    for i in range(2):
        rows = slice(i * 128, (i + 1) * 128)
        nisa.nc_matmul(dst=p, stationary=load(x[rows]), moving=load(y[rows]))
    return evict(p)


@clean(CLEAN, lambda x: bf16(x[:64]).T @ bf16(x[64:]), f32(128, 64))
def matmul_on_the_lower_half_of_the_array(x):
    a, b = load(x[0:64], nl.bfloat16), load(x[64:128], nl.bfloat16)
    p = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=p, stationary=a, moving=b, tile_position=(64, 0), tile_size=(64, 128))
    return evict(p)


@clean(
    CLEAN,
    lambda x: np.einsum("pdm,pdn->mn", *[dtypes.round_to(x, "float8_e5m2")] * 2),
    f32(128, 2, 16),
)
def double_row_of_256(x):
    a = load(x, nl.float8_e5m2)
    p = nl.ndarray((16, 16), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=p, stationary=a, moving=a, perf_mode=nisa.matmul_perf_mode.double_row)
    return evict(p)


@clean(CLEAN, lambda x: np.full((128, 512), 8.0, np.float32), f32(1, 1))
def all_eight_psum_banks(x):
    banks = [tile((128, 512), buffer=nl.psum) for _ in range(8)]
    total = tile((128, 512), value=0)
    for bank in banks:
        nisa.tensor_tensor(dst=total, data1=total, data2=bank, op=nl.add)
    return store(total)


@clean(CLEAN, lambda x: x, f32(128, 64))
def psum_at_the_start_of_the_last_bank(x):
    p = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum, address=(0, 7 * 2048))
    nisa.tensor_copy(dst=p, src=load(x))
    return evict(p)


@clean(CLEAN, lambda x: x[:, :4], f32(128, 8))
def a_whole_sbuf_partition(x):
    big = nl.ndarray((128, 56 * 1024 - 8), dtype=nl.float32, buffer=nl.sbuf)
    t = load(x)
    nisa.tensor_copy(dst=big[:, 0:4], src=t[:, 0:4])
    return store(big[:, 0:4])


@clean(CLEAN, lambda x: x.T, f32(128, 128))
def tensor_engine_transpose_of_128(x):
    p = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=p, data=load(x), engine=nisa.engine.tensor)
    return evict(p)


@clean(CLEAN, lambda x: x.T, f32(32, 32))
def vector_engine_transpose_of_32(x):
    t = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_transpose(dst=t, data=load(x), engine=nisa.engine.vector)
    return store(t)


@clean(CLEAN, lambda x: np.concatenate([x[96:], x[64:96], x[32:64], x[:32]]), f32(128, 8))
def every_quadrant_start(x):
    t = load(x)
    r = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    for start in (0, 32, 64, 96):
        nisa.tensor_copy(dst=r[96 - start : 128 - start, :], src=t[start : start + 32, :])
    return store(r)


@clean(CLEAN, lambda x: np.exp(x[64:]), f32(128, 8))
def sixty_four_partitions_from_64(x):
    r = nl.ndarray((64, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=r, op=nl.exp, data=load(x)[64:128, :])
    return store(r)


@clean(CLEAN, lambda x: x[:, 1::2], f32(128, 64))
def every_other_column(x):
    t = load(x)
    r = nl.ndarray((128, 32), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=r, src=t[:, 1:64:2])
    return store(r)


@clean(CLEAN, lambda x: x.reshape(128, 2, 2, 2, 2).transpose(0, 4, 3, 2, 1), f32(128, 16))
def five_dimensions_on_chip(x):
    t = load(x).reshape((128, 2, 2, 2, 2))
    r = nl.ndarray((128, 2, 2, 2, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=r, src=t.permute((0, 4, 3, 2, 1)))
    return store(r)


@clean(CLEAN, lambda x: x.view(np.uint8).view(np.float32) * 0 + x, f32(128, 8))
def reinterpretation_there_and_back(x):
    return store(load(x).view(nl.uint8).view(nl.float32))


@clean(CLEAN, lambda x: (x - x.max(1, keepdims=True)).astype(np.float32), f32(128, 64))
def subtract_the_row_maximum(x):
    t = load(x)
    m = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=m, op=nl.maximum, data=t, axis=1)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.subtract, operand0=m)
    return store(t)


@clean(CLEAN, lambda x: np.exp(x).sum(1, keepdims=True), f32(128, 64))
def row_sum_in_the_accumulator(x):
    t = load(x)
    total = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    first, more = nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce
    e = nl.ndarray((128, 32), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=e, op=nl.exp, data=t[:, 0:32], reduce_op=nl.add, reduce_cmd=first)
    nisa.activation(dst=e, op=nl.exp, data=t[:, 32:64], reduce_op=nl.add, reduce_cmd=more, reduce_res=total)
    return store(total)


@clean(CLEAN, lambda x: np.exp(x - 1), f32(128, 64), target="trn3")
def fast_exponential_on_trn3(x):
    t = load(x)
    nisa.exponential(dst=t, src=t, max_value=1.0)
    return store(t)


@clean(CLEAN, lambda x: scalar.apply("gelu", 2 * x + 0.5), f32(128, 64), target="trn3")
def activate2_on_trn3(x):
    t = load(x)
    nisa.activate2(dst=t, op=nl.gelu, data=t, imm0=2.0, imm1=0.5, op0=nl.multiply, op1=nl.add)
    return store(t)


@clean(CLEAN, lambda x: vector.bn_aggr(vector.bn_stats(x)), f32(128, 512))
def bn_stats_of_512_elements(x):
    s = nl.ndarray((128, 6), dtype=nl.float32, buffer=nl.sbuf)
    r = nl.ndarray((128, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_stats(dst=s, data=load(x))
    nisa.bn_aggr(dst=r, data=s)
    return store(r)


@clean(CLEAN, lambda x: (vector.max8(x), vector.nc_find_index8(x, vector.max8(x))), f32(128, 8))
def eight_largest_of_eight(x):
    t = load(x)
    v = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    i = nl.ndarray((128, 8), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.max8(dst=v, src=t)
    nisa.nc_find_index8(dst=i, data=t, vals=v)
    return store(v), store(i)


@clean(CLEAN, lambda x: gpsimd.iota(128, [[100, 4], [1, 8]], 5, 1000), f32(1, 1))
def iota_that_fills_the_tile(x):
    t = nl.ndarray((128, 4, 8), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=t, pattern=[[100, 4], [1, 8]], offset=5, channel_multiplier=1000)
    return store(t)


@clean(CLEAN, lambda x: np.tril(x), f32(128, 128))
def causal_mask(x):
    t = load(x)
    nisa.affine_select(t, [[-1, 128]], 1, on_true_tile=t, on_false_value=0.0, cmp_op=nl.greater_equal)
    return store(t)


@clean(CLEAN, lambda x: np.roll(x, 1, axis=0), f32(32, 8))
def shuffle_within_a_quadrant(x):
    t = load(x)
    nisa.nc_stream_shuffle(dst=t, src=t, shuffle_mask=[(i - 1) % 32 for i in range(32)])
    return store(t)


@clean(CLEAN, lambda x, i: gpsimd.nc_n_gather(x, i), f32(128, 8), array([[7, 0, 7]] * 128, "uint32"))
def gather_of_the_last_element(x, indices):
    r = nl.ndarray((128, 3), dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=r, data=load(x), indices=load(indices))
    return store(r)


@clean(CLEAN, lambda x, i: x[i[:, 0]], f32(64, 8), array([[0], [63], [63]], "uint32"))
def gather_of_the_last_row(x, rows):
    t = nl.ndarray((3, 8), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x.ap(pattern=[[8, 3], [1, 8]], vector_offset=load(rows), indirect_dim=0))
    return store(t)


@clean(CLEAN, lambda x, i: np.stack([x[1], np.ones(8), x[63]]), f32(64, 8), array([[1], [64], [63]], "uint32"))
def gather_that_skips_what_is_out_of_bounds(x, rows):
    t = tile((3, 8))
    src = x.ap(pattern=[[8, 3], [1, 8]], vector_offset=load(rows), indirect_dim=0)
    nisa.dma_copy(dst=t, src=src, oob_mode=nisa.oob_mode.skip)
    return store(t)


@clean(CLEAN, lambda x, i: x[32:], f32(64, 8), array([[32]], "int32"))
def scalar_offset_to_the_last_rows(x, start):
    t = nl.ndarray((32, 8), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x.ap(pattern=[[8, 32], [1, 8]], scalar_offset=load(start), indirect_dim=0))
    return store(t)


@clean(CLEAN, lambda x: dma.dma_transpose(bf16(x)), f32(16, 128))
def hardware_transpose_at_its_limits(x):
    t = load(x, nl.bfloat16)
    r = nl.ndarray((128, 16), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_transpose(dst=r, src=t, dge_mode=nisa.dge_mode.hwdge)
    return store(r)


@clean(CLEAN, lambda x: 16 * x, f32(128, 8))
def dma_sum_of_sixteen(x):
    r = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_compute(dst=r, srcs=[x] * 16, reduce_op=nl.add)
    return store(r)


@clean(CLEAN, lambda x, n: x * 2.0 ** n[0, 0], f32(128, 8), array([[3]], "int32"))
def loop_with_a_bound_from_memory(x, count):
    t = load(x)
    bound = nisa.register_alloc()
    nisa.register_load(bound, load(count))
    nl.fori_loop(0, bound, lambda i: nisa.tensor_tensor(dst=t, data1=t, data2=t, op=nl.add) and None)
    return store(t)


@clean(CLEAN, lambda x: x, f32(128, 8))
def order_kept_inside_a_dynamic_loop(x):
    t = load(x)
    r = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    for _ in nl.dynamic_range(2):
        with nl.no_reorder():
            nisa.tensor_copy(dst=r, src=t)
    return store(r)


@clean(CLEAN, lambda x: x[:, :1] + x[:, 1:2], f32(128, 2))
def one_psum_and_one_sbuf_input(x):
    t = load(x)
    p = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.tensor_copy(dst=p, src=t[:, 0:1])
    nisa.tensor_tensor(dst=p, data1=p, data2=t[:, 1:2], op=nl.add)
    return evict(p)
