"""Kernels that break a rule of the Tensor engine and of MX quantisation."""

from __future__ import annotations

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .cases import Case, broken
from .kernel_helpers import tile

CASES: list[Case] = []


def psum(*shape: int):
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)


@broken(CASES, "memory-access")
def matmul_into_sbuf():
    a = tile((128, 128), nl.bfloat16)
    nisa.nc_matmul(dst=tile((128, 128)), stationary=a, moving=a)  # <- breaks


@broken(CASES, "memory-access")
def matmul_from_psum():
    a = tile((128, 128), nl.bfloat16)
    b = tile((128, 128), nl.bfloat16, buffer=nl.psum)
    nisa.nc_matmul(dst=psum(128, 128), stationary=a, moving=b)  # <- breaks


@broken(CASES, "matmul-shape")
def matmul_of_different_contractions():
    a, b = tile((128, 128), nl.bfloat16), tile((64, 128), nl.bfloat16)
    nisa.nc_matmul(dst=psum(128, 128), stationary=a, moving=b)  # <- breaks


@broken(CASES, "matmul-shape")
def matmul_into_the_transposed_shape():
    a, b = tile((128, 64), nl.bfloat16), tile((128, 32), nl.bfloat16)
    nisa.nc_matmul(dst=psum(32, 64), stationary=a, moving=b)  # <- breaks


@broken(CASES, "stationary-limit")
def stationary_of_129_columns():
    a, b = tile((128, 129), nl.bfloat16), tile((128, 8), nl.bfloat16)
    nisa.nc_matmul(dst=psum(128, 8), stationary=a, moving=b)  # <- breaks


@broken(CASES, "tile-position")
def stationary_wider_than_its_column_tile():
    a, b = tile((128, 96), nl.bfloat16), tile((128, 8), nl.bfloat16)
    nisa.nc_matmul(psum(96, 8), a, b, tile_position=(0, 0), tile_size=(128, 64))  # <- breaks


@broken(CASES, "moving-limit")
def moving_of_513_columns():
    a, b = tile((128, 128), nl.bfloat16), tile((128, 513), nl.bfloat16)
    nisa.nc_matmul(dst=psum(128, 513), stationary=a, moving=b)  # <- breaks


@broken(CASES, "operand-dtype")
def matmul_of_float32_and_bfloat16():
    a, b = tile((128, 128)), tile((128, 128), nl.bfloat16)
    nisa.nc_matmul(dst=psum(128, 128), stationary=a, moving=b)  # <- breaks


@broken(CASES, "operand-dtype")
def matmul_of_integers():
    a = tile((128, 128), nl.int32)
    nisa.nc_matmul(dst=psum(128, 128), stationary=a, moving=a)  # <- breaks


@broken(CASES, "operand-dtype", target="trn3")
def matmul_of_both_e4m3_formats():
    a, b = tile((128, 128), nl.float8_e4m3), tile((128, 128), nl.float8_e4m3fn)
    nisa.nc_matmul(dst=psum(128, 128), stationary=a, moving=b)  # <- breaks


@broken(CASES, "operand-dtype")
def matmul_into_bfloat16_before_trn3():
    a = tile((128, 128), nl.bfloat16)
    p = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.psum)
    nisa.nc_matmul(dst=p, stationary=a, moving=a)  # <- breaks


@broken(CASES, "psum-accumulate")
def accumulation_onto_nothing():
    a = tile((128, 128), nl.bfloat16)
    nisa.nc_matmul(dst=psum(128, 128), stationary=a, moving=a, accumulate=True)  # <- breaks


@broken(CASES, "psum-accumulate")
def accumulation_onto_a_memset_before_trn3():
    a = tile((128, 128), nl.bfloat16)
    nisa.nc_matmul(tile((128, 128), buffer=nl.psum), stationary=a, moving=a, accumulate=True)  # <- breaks


@broken(CASES, "psum-bank")
def matmul_across_two_banks():
    a, b = tile((128, 128), nl.bfloat16), tile((128, 512), nl.bfloat16)
    nisa.nc_matmul(dst=psum(128, 1024)[:, 256:768], stationary=a, moving=b)  # <- breaks


@broken(CASES, "tile-position")
def double_row_with_column_tiles():
    a, b = tile((128, 2, 64), nl.float8_e5m2), tile((128, 2, 64), nl.float8_e5m2)
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(psum(64, 64), a, b, perf_mode=mode, tile_position=(0, 0), tile_size=(128, 64))  # <- breaks


@broken(CASES, "operand-dtype")
def double_row_of_bfloat16():
    a, b = tile((128, 2, 128), nl.bfloat16), tile((128, 2, 64), nl.bfloat16)
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(dst=psum(128, 64), stationary=a, moving=b, perf_mode=mode)  # <- breaks


@broken(CASES, "matmul-shape")
def double_row_of_three():
    a, b = tile((128, 3, 128), nl.float8_e5m2), tile((128, 3, 64), nl.float8_e5m2)
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(dst=psum(128, 64), stationary=a, moving=b, perf_mode=mode)  # <- breaks


@broken(CASES, "tile-position")
def tile_size_without_a_position():
    a = tile((64, 128), nl.bfloat16)
    nisa.nc_matmul(dst=psum(128, 128), stationary=a, moving=a, tile_size=(64, 128))  # <- breaks


@broken(CASES, "tile-position")
def tile_position_off_the_grid():
    a = tile((64, 128), nl.bfloat16)
    nisa.nc_matmul(psum(128, 128), a, a, tile_position=(32, 0), tile_size=(64, 128))  # <- breaks


@broken(CASES, "transpose-limit")
def vector_transpose_of_64():
    a = tile((64, 64))
    nisa.nc_transpose(dst=tile((64, 64)), data=a, engine=nisa.engine.vector)  # <- breaks


@broken(CASES, "matching-dtype")
def transpose_that_casts():
    a = tile((32, 32), nl.bfloat16)
    nisa.nc_transpose(dst=tile((32, 32)), data=a, engine=nisa.engine.vector)  # <- breaks


@broken(CASES, "matmul-shape")
def transpose_that_keeps_the_shape():
    a = tile((32, 16))
    nisa.nc_transpose(dst=tile((32, 16)), data=a, engine=nisa.engine.vector)  # <- breaks


@broken(CASES, "target")
def mx_quantisation_before_trn3():
    q, s = nl.ndarray((32, 2), dtype=nl.uint32), nl.ndarray((4, 2), dtype=nl.uint8)
    nisa.quantize_mx(dst=q, src=tile((32, 8), nl.bfloat16), dst_scale=s)  # <- breaks


@broken(CASES, "operand-dtype", target="trn3")
def mx_quantisation_of_float32():
    q, s = nl.ndarray((32, 2), dtype=nl.float8_e4m3fn_x4), nl.ndarray((4, 2), dtype=nl.uint8)
    nisa.quantize_mx(dst=q, src=tile((32, 8)), dst_scale=s)  # <- breaks


@broken(CASES, "mx-partition", target="trn3")
def mx_quantisation_of_16_partitions():
    q, s = nl.ndarray((16, 2), dtype=nl.float8_e4m3fn_x4), nl.ndarray((2, 2), dtype=nl.uint8)
    nisa.quantize_mx(dst=q, src=tile((16, 8), nl.bfloat16), dst_scale=s)  # <- breaks


@broken(CASES, "mx-free", target="trn3")
def mx_quantisation_of_six_elements():
    q, s = nl.ndarray((32, 1), dtype=nl.float8_e4m3fn_x4), nl.ndarray((4, 1), dtype=nl.uint8)
    nisa.quantize_mx(dst=q, src=tile((32, 6), nl.bfloat16), dst_scale=s)  # <- breaks


@broken(CASES, "mx-scale-layout", target="trn3")
def dense_scales_of_128_partitions():
    q, s = nl.ndarray((128, 2), dtype=nl.float8_e4m3fn_x4), nl.ndarray((16, 2), dtype=nl.uint8)
    nisa.quantize_mx(dst=q, src=tile((128, 8), nl.bfloat16), dst_scale=s)  # <- breaks


@broken(CASES, "operand-dtype", target="trn3")
def mx_matmul_with_float_scales():
    q = tile((32, 8), nl.float8_e4m3fn_x4, value=0)
    s = tile((4, 8))
    nisa.nc_matmul_mx(psum(8, 8), q, q, s, s)  # <- breaks
