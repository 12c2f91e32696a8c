"""Kernels that break a rule of tensors, views and memories."""

from __future__ import annotations

import numpy as np

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim.errors import CapacityError, OutOfBoundsError, UninitializedReadError

from .cases import Case, array, broken, f32
from .kernel_helpers import load, store, tile

CASES: list[Case] = []


@broken(CASES, "partition-limit")
def more_than_128_partitions():
    nisa.memset(dst=nl.ndarray((129, 8), dtype=nl.float32, buffer=nl.sbuf), value=0.0)  # <- breaks


@broken(CASES, "buffer")
def buffer_as_string():
    nl.ndarray((128, 8), dtype=nl.float32, buffer="sbuf")  # <- breaks


@broken(CASES, "tensor-dtype")
def dtype_the_hardware_lacks():
    nl.ndarray((128, 8), dtype="float64", buffer=nl.sbuf)  # <- breaks


@broken(CASES, "tensor-shape")
def dimension_of_zero():
    nl.ndarray((128, 0), dtype=nl.float32, buffer=nl.sbuf)  # <- breaks


@broken(CASES, "enum-argument", f32(128, 8))
def dge_mode_as_integer(x):
    t = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x, dge_mode=2)  # <- breaks


@broken(CASES, "sbuf-capacity", error=CapacityError)
def two_tiles_that_do_not_fit_sbuf():
    a = tile((128, 32768))
    nisa.tensor_copy(dst=nl.ndarray((128, 32768), dtype=nl.float32, buffer=nl.sbuf), src=a)  # <- breaks


@broken(CASES, "psum-capacity", error=CapacityError)
def nine_psum_banks():
    banks = [tile((128, 512), buffer=nl.psum) for _ in range(8)]
    nisa.tensor_copy(dst=nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum), src=banks[0])  # <- breaks
    for bank in banks:
        nisa.tensor_copy(dst=tile((128, 512)), src=bank)


@broken(CASES, "hbm-capacity", error=CapacityError)
def two_tebibytes_of_hbm():
    nl.ndarray((2**20, 2**20), dtype=nl.bfloat16, buffer=nl.shared_hbm)  # <- breaks


@broken(CASES, "address", error=OutOfBoundsError)
def psum_address_inside_a_bank():
    nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum, address=(0, 1024))  # <- breaks


@broken(CASES, "address", error=OutOfBoundsError)
def sbuf_address_beyond_the_partition():
    nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf, address=(0, 2**20))  # <- breaks


@broken(CASES, "uninitialised-read", error=UninitializedReadError)
def read_of_an_unwritten_tile():
    a = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    b = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=b, src=a)  # <- breaks


@broken(CASES, "uninitialised-read", error=UninitializedReadError)
def read_one_column_beyond_what_was_written():
    a = nl.ndarray((128, 9), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=a[:, 0:8], value=1)
    nisa.tensor_reduce(dst=tile((128, 1)), op=nl.add, data=a, axis=1)  # <- breaks


@broken(CASES, "uninitialised-output", f32(128, 8), error=UninitializedReadError)
def output_of_which_a_row_is_missing(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)  # <- breaks
    nisa.dma_copy(dst=out[0:127, :], src=load(x)[0:127, :])
    return out


@broken(CASES, "kernel-output", f32(128, 8))
def output_in_private_hbm(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)  # <- breaks
    nisa.dma_copy(dst=out, src=load(x))
    return out


@broken(CASES, "tensor-operand", f32(128, 8))
def array_that_is_no_argument(x):
    nisa.tensor_tensor(dst=tile((128, 8)), data1=load(x), data2=np.ones((128, 8), np.float32), op=nl.add)  # <- breaks


@broken(CASES, "index-bounds", f32(128, 8), error=OutOfBoundsError)
def slice_beyond_the_end(x):
    return store(load(x[0:128, 4:9]))  # <- breaks


@broken(CASES, "access-bounds", f32(128, 8), error=OutOfBoundsError)
def access_pattern_beyond_the_end(x):
    nisa.dma_copy(dst=tile((128, 9)), src=x.ap(pattern=[[8, 128], [1, 9]]))  # <- breaks


@broken(CASES, "dynamic-bounds", f32(64, 8), array([[0], [63], [64]], "uint32"), error=OutOfBoundsError)
def gather_of_a_row_that_does_not_exist(x, rows):
    index = load(rows)
    t = nl.ndarray((3, 8), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x.ap(pattern=[[8, 3], [1, 8]], vector_offset=index, indirect_dim=0))  # <- breaks


@broken(CASES, "dynamic-bounds", f32(64, 8), array([[33]], "int32"), error=OutOfBoundsError)
def scalar_offset_beyond_the_end(x, start):
    offset = load(start)
    t = nl.ndarray((32, 8), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=x.ap(pattern=[[8, 32], [1, 8]], scalar_offset=offset, indirect_dim=0))  # <- breaks


@broken(CASES, "access-pattern-dims")
def six_dimensions_on_chip():
    t = nl.ndarray((128, 2, 2, 2, 2, 2), dtype=nl.float32, buffer=nl.sbuf).permute((0, 5, 4, 3, 2, 1))
    nisa.memset(dst=t, value=0.0)  # <- breaks


@broken(CASES, "partition-stride")
def every_other_partition():
    t = tile((128, 32))
    nisa.tensor_copy(dst=tile((64, 32)), src=t[0:128:2, :])  # <- breaks


@broken(CASES, "partition-stride")
def access_pattern_that_skips_partitions():
    t = tile((16, 32))
    nisa.tensor_copy(dst=tile((8, 32)), src=t.ap(pattern=[[64, 8], [1, 32]]))  # <- breaks


@broken(CASES, "view")
def permute_of_the_partition_dim():
    tile((128, 128)).permute((1, 0))  # <- breaks


@broken(CASES, "view")
def broadcast_of_the_partition_dim():
    tile((1, 128)).broadcast(0, 128)  # <- breaks


@broken(CASES, "view")
def reshape_that_changes_the_element_count():
    tile((128, 64)).reshape((128, 65))  # <- breaks


@broken(CASES, "view")
def reshape_of_the_partition_dim():
    tile((128, 64)).reshape((64, 128))  # <- breaks


@broken(CASES, "view")
def flatten_of_permuted_dims():
    tile((128, 4, 8)).permute((0, 2, 1)).flatten_dims(1, 2)  # <- breaks


@broken(CASES, "view")
def broadcast_of_a_dim_larger_than_one():
    tile((128, 2, 8)).broadcast(1, 4)  # <- breaks


@broken(CASES, "view")
def reinterpretation_that_does_not_divide():
    tile((128, 6), nl.uint8).view(nl.float32)  # <- breaks


@broken(CASES, "view", array([[0]] * 128, "uint32"))
def vector_select_on_chip(rows):
    tile((128, 8)).vector_select(0, load(rows))  # <- breaks


@broken(CASES, "indirect-view", f32(4, 8, 16), array([[1]], "int32"))
def two_dynamic_selects(x, one):
    index = load(one)
    x.select(0, index).select(0, index)  # <- breaks


@broken(CASES, "indirect-view", f32(64, 8), array([[0]] * 64, "uint32"), array([[0]], "uint32"))
def scalar_and_vector_offset_together(x, rows, one):
    v, s = load(rows), load(one)
    x.ap(pattern=[[8, 64], [1, 8]], vector_offset=v, scalar_offset=s)  # <- breaks


@broken(CASES, "write-overlap")
def destination_that_repeats_elements():
    t = tile((128, 1, 8))
    nisa.tensor_copy(dst=t.broadcast(1, 4), src=tile((128, 4, 8)))  # <- breaks


@broken(CASES, "write-overlap")
def destination_of_overlapping_windows():
    windows = tile((128, 8)).ap([[8, 128], [1, 4], [1, 4]])
    nisa.tensor_copy(dst=windows, src=tile((128, 4, 4)))  # <- breaks
