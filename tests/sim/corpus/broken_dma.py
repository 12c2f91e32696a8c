"""Kernels that break a rule of DMA, registers and loops."""

from __future__ import annotations

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .cases import Case, array, broken, f32
from .kernel_helpers import load, tile

CASES: list[Case] = []


@broken(CASES, "dma-psum", f32(128, 8))
def dma_from_psum(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile((128, 8), buffer=nl.psum))  # <- breaks


@broken(CASES, "element-count", f32(128, 8))
def dma_of_different_sizes(x):
    nisa.dma_copy(dst=tile((128, 4)), src=x)  # <- breaks


@broken(CASES, "dma-mode", f32(64, 8), array([[1], [2]], "uint32"))
def gather_by_hardware_descriptors(x, rows):
    src = x.ap(pattern=[[8, 2], [1, 8]], vector_offset=load(rows), indirect_dim=0)
    nisa.dma_copy(dst=tile((2, 8)), src=src, dge_mode=nisa.dge_mode.hwdge)  # <- breaks


@broken(CASES, "dma-mode", f32(128, 8))
def hardware_descriptors_from_the_vector_engine(x):
    t = tile((128, 8))
    nisa.dma_copy(dst=t, src=x, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.vector)  # <- breaks


@broken(CASES, "dma-mode", f32(128, 8))
def trigger_engine_without_hardware_descriptors(x):
    nisa.dma_copy(dst=tile((128, 8)), src=x, engine=nisa.engine.scalar)  # <- breaks


@broken(CASES, "matching-dtype", f32(128, 8))
def hardware_descriptors_that_cast(x):
    nisa.dma_copy(dst=tile((128, 8), nl.bfloat16), src=x, dge_mode=nisa.dge_mode.hwdge)  # <- breaks


@broken(CASES, "dma-cast", f32(128, 8), target="trn3")
def dma_that_casts_to_a_packed_dtype(x):
    nisa.dma_copy(dst=nl.ndarray((128, 8), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf), src=x)  # <- breaks


@broken(CASES, "target", f32(128, 8))
def dma_priority_before_trn3(x):
    nisa.dma_copy(dst=tile((128, 8)), src=x, priority=1)  # <- breaks


@broken(CASES, "dma-mode", f32(128, 8), target="trn3")
def dma_priority_four(x):
    nisa.dma_copy(dst=tile((128, 8)), src=x, priority=4)  # <- breaks


@broken(CASES, "dma-transpose-axes", f32(4, 8, 16))
def dma_transpose_by_other_axes(x):
    nisa.dma_transpose(dst=tile((8, 4, 16)), src=x, axes=(1, 0, 2))  # <- breaks


@broken(CASES, "dma-transpose-hwdge", f32(16, 128))
def hardware_transpose_of_float32(x):
    nisa.dma_transpose(dst=tile((128, 16)), src=x, dge_mode=nisa.dge_mode.hwdge)  # <- breaks


@broken(CASES, "transpose-shape", f32(16, 64))
def dma_transpose_into_another_shape(x):
    nisa.dma_transpose(dst=tile((16, 64)), src=x)  # <- breaks


@broken(CASES, "dma-transpose-indirect", f32(64, 256), array([[i] for i in range(16)], "uint32"))
def gather_transpose_of_wide_rows(x, rows):
    half = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.hbm)
    nisa.dma_copy(dst=half, src=x)
    src = half.ap(pattern=[[256, 16], [1, 256]], vector_offset=load(rows), indirect_dim=0)
    nisa.dma_transpose(dst=nl.ndarray((256, 16), dtype=nl.bfloat16, buffer=nl.shared_hbm), src=src)  # <- breaks


@broken(CASES, "dma-compute", f32(128, 8))
def dma_that_multiplies(x):
    nisa.dma_compute(dst=tile((128, 8)), srcs=[x, x], reduce_op=nl.multiply)  # <- breaks


@broken(CASES, "dma-compute", f32(128, 8))
def dma_that_scales(x):
    nisa.dma_compute(dst=tile((128, 8)), srcs=[x, x], reduce_op=nl.add, scales=[1.0, 0.5])  # <- breaks


@broken(CASES, "register")
def register_without_a_value():
    nisa.register_store(tile((1, 1), nl.int32), nisa.register_alloc())  # <- breaks


@broken(CASES, "register")
def register_from_two_elements():
    nisa.register_load(nisa.register_alloc(), tile((1, 2), nl.int32))  # <- breaks


@broken(CASES, "register")
def write_to_the_loop_register():
    for i in nl.dynamic_range(3):
        nisa.register_move(i, 0)  # <- breaks


@broken(CASES, "loop-step")
def loop_that_steps_by_zero():
    for _ in nl.dynamic_range(0, 4, 0):  # <- breaks
        tile((1, 1))


@broken(CASES, "loop-step")
def loop_that_counts_down():
    nl.fori_loop(4, 0, lambda i: None, step=-1)  # <- breaks


@broken(CASES, "loop-no-reorder")
def dynamic_loop_inside_no_reorder():
    with nl.no_reorder():
        nl.fori_loop(0, 2, lambda i: None)  # <- breaks


@broken(CASES, "loop-body")
def fori_body_that_returns():
    nl.fori_loop(0, 2, lambda i: i)  # <- breaks


@broken(CASES, "loop-body")
def while_body_that_returns_nothing():
    nl.while_loop(nisa.register_alloc(1), lambda r: None)  # <- breaks
