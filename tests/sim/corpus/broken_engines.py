"""Kernels that break a rule of the Vector, Scalar and GpSimd engines."""

from __future__ import annotations

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim.errors import OutOfBoundsError

from .cases import Case, array, broken, f32
from .kernel_helpers import load, tile

CASES: list[Case] = []


@broken(CASES, "engine-choice")
def memset_on_the_scalar_engine():
    nisa.memset(dst=nl.ndarray((128, 8), dtype=nl.float32), value=0.0, engine=nisa.engine.scalar)  # <- breaks


@broken(CASES, "memory-access", f32(128, 8))
def vector_engine_on_hbm(x):
    nisa.tensor_tensor(dst=tile((128, 8)), data1=x, data2=tile((128, 8)), op=nl.add)  # <- breaks


@broken(CASES, "memory-access")
def gpsimd_reads_psum():
    p = tile((128, 8), buffer=nl.psum)
    nisa.tensor_copy(dst=tile((128, 8)), src=p, engine=nisa.engine.gpsimd)  # <- breaks


@broken(CASES, "memory-access")
def iota_into_psum():
    nisa.iota(dst=nl.ndarray((128, 8), dtype=nl.int32, buffer=nl.psum), pattern=[[1, 8]])  # <- breaks


@broken(CASES, "memory-access")
def power_of_a_psum_tile():
    p = tile((128, 8), buffer=nl.psum)
    nisa.tensor_tensor(dst=tile((128, 8)), data1=p, data2=tile((128, 8)), op=nl.power)  # <- breaks


@broken(CASES, "both-in-psum")
def two_psum_inputs():
    a, b = tile((128, 8), buffer=nl.psum), tile((128, 8), buffer=nl.psum)
    nisa.tensor_tensor(dst=tile((128, 8)), data1=a, data2=b, op=nl.add)  # <- breaks


@broken(CASES, "both-in-psum")
def scan_of_two_psum_inputs():
    a, b = tile((128, 8), buffer=nl.psum), tile((128, 8), buffer=nl.psum)
    t = tile((128, 8))
    nisa.tensor_tensor_scan(dst=t, data0=a, data1=b, initial=0.0, op0=nl.multiply, op1=nl.add)  # <- breaks


@broken(CASES, "start-partition")
def quadrant_that_starts_at_16():
    t = tile((128, 8))
    nisa.tensor_copy(dst=tile((32, 8)), src=t[16:48, :])  # <- breaks


@broken(CASES, "start-partition")
def sixty_four_partitions_from_32():
    t = tile((128, 8))
    nisa.activation(dst=tile((64, 8)), op=nl.exp, data=t[32:96, :])  # <- breaks


@broken(CASES, "same-partitions")
def more_partitions_in_than_out():
    nisa.tensor_copy(dst=tile((64, 8)), src=tile((128, 8)))  # <- breaks


@broken(CASES, "same-elements")
def more_elements_in_than_out():
    nisa.activation(dst=tile((128, 8)), op=nl.exp, data=tile((128, 9)))  # <- breaks


@broken(CASES, "target")
def activate2_before_trn3():
    t = tile((128, 8))
    nisa.activate2(dst=t, op=nl.gelu, data=t, imm0=2.0, imm1=0.5, op0=nl.multiply, op1=nl.add)  # <- breaks


@broken(CASES, "target")
def exponential_before_trn3():
    nisa.exponential(dst=tile((128, 8)), src=tile((128, 8)))  # <- breaks


@broken(CASES, "target")
def abs_max_before_trn3():
    nisa.tensor_tensor(dst=tile((128, 8)), data1=tile((128, 8)), data2=tile((128, 8)), op=nl.abs_max)  # <- breaks


@broken(CASES, "target")
def rand2_before_trn3():
    nisa.rand2(dst=tile((128, 8)), min=0.0, max=1.0)  # <- breaks


@broken(CASES, "bitvec-integer")
def bitwise_and_of_floats():
    nisa.tensor_tensor(dst=tile((128, 8)), data1=tile((128, 8)), data2=tile((128, 8)), op=nl.bitwise_and)  # <- breaks


@broken(CASES, "operator-kind")
def bitwise_then_arithmetic():
    t = tile((128, 8), nl.int32)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.bitwise_and, operand0=3, op1=nl.add, operand1=1.0)  # <- breaks


@broken(CASES, "operator")
def activation_with_a_binary_operator():
    nisa.activation(dst=tile((128, 8)), op=nl.add, data=tile((128, 8)))  # <- breaks


@broken(CASES, "engine-choice")
def subtract_on_the_scalar_engine_of_trn2():
    t = tile((128, 8))
    nisa.tensor_scalar(dst=t, data=t, op0=nl.subtract, operand0=1.0, engine=nisa.engine.scalar)  # <- breaks


@broken(CASES, "operator")
def reduction_with_power():
    nisa.tensor_reduce(dst=tile((128, 1)), op=nl.power, data=tile((128, 8)), axis=1)  # <- breaks


@broken(CASES, "operator")
def range_select_with_not_equal():
    bound = tile((128, 1))
    t = tile((128, 8))
    nisa.range_select(t, t, nl.not_equal, nl.less, bound, bound, on_false_value=-3.4028235e38)  # <- breaks


@broken(CASES, "reduce-axis")
def reduction_over_partitions():
    nisa.tensor_reduce(dst=tile((1, 8)), op=nl.add, data=tile((128, 8)), axis=0)  # <- breaks


@broken(CASES, "reduce-axis")
def reduction_over_a_middle_dim():
    nisa.tensor_reduce(dst=tile((128, 8)), op=nl.add, data=tile((128, 4, 8)), axis=1)  # <- breaks


@broken(CASES, "reduce-register")
def activation_reduced_by_maximum():
    t, r = tile((128, 8)), tile((128, 1))
    reset = nisa.reduce_cmd.reset_reduce
    nisa.activation(dst=t, op=nl.exp, data=t, reduce_op=nl.maximum, reduce_cmd=reset, reduce_res=r)  # <- breaks


@broken(CASES, "reduce-register")
def load_reduce_without_an_initial_value():
    t, r = tile((128, 8)), tile((128, 1))
    loads = nisa.reduce_cmd.load_reduce
    nisa.tensor_scalar_reduce(t, t, nl.multiply, 2.0, reduce_op=nl.add, reduce_res=r, reduce_cmd=loads)  # <- breaks


@broken(CASES, "reduce-register")
def reduction_that_continues_nothing():
    t, r = tile((128, 8)), tile((128, 1))
    more = nisa.reduce_cmd.reduce
    nisa.tensor_scalar_reduce(t, t, nl.multiply, 2.0, reduce_op=nl.add, reduce_res=r, reduce_cmd=more)  # <- breaks


@broken(CASES, "vector-operand")
def operand_of_two_columns():
    t = tile((128, 8))
    nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=tile((128, 2)))  # <- breaks


@broken(CASES, "operand-dtype")
def operand_in_bfloat16():
    t = tile((128, 8))
    nisa.tensor_scalar(dst=t, data=t, op0=nl.multiply, operand0=tile((128, 1), nl.bfloat16))  # <- breaks


@broken(CASES, "operand-dtype")
def float_predicate():
    nisa.tensor_copy_predicated(dst=tile((128, 8)), src=tile((128, 8)), predicate=tile((128, 8)))  # <- breaks


@broken(CASES, "operand-dtype")
def cumulative_over_int32():
    t = tile((128, 8), nl.int32)
    nisa.tensor_scalar_cumulative(dst=t, src=t, op0=nl.add, op1=nl.add, imm0=0.0)  # <- breaks


@broken(CASES, "operand-dtype")
def random_bits_into_float32():
    nisa.rng(dst=nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf))  # <- breaks


@broken(CASES, "scalar-operand")
def unary_operator_with_an_operand():
    t = tile((128, 8))
    nisa.tensor_scalar(dst=t, data=t, op0=nl.abs, operand0=3.0)  # <- breaks


@broken(CASES, "memset-value")
def float_into_an_integer_tile():
    nisa.memset(dst=nl.ndarray((128, 8), dtype=nl.int32, buffer=nl.sbuf), value=2.0)  # <- breaks


@broken(CASES, "memset-value", target="trn3")
def packed_tile_filled_with_one():
    nisa.memset(dst=nl.ndarray((128, 8), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf), value=1)  # <- breaks


@broken(CASES, "activation-range")
def logarithm_of_zero():
    nisa.activation(dst=tile((128, 8)), op=nl.log, data=tile((128, 8), value=0))  # <- breaks


@broken(CASES, "activation-range")
def sine_beyond_pi():
    nisa.activation(dst=tile((128, 8)), op=nl.sin, data=tile((128, 8), value=9))  # <- breaks


@broken(CASES, "matching-dtype")
def predicated_copy_that_casts():
    mask = tile((128, 8), nl.uint8)
    nisa.tensor_copy_predicated(dst=tile((128, 8)), src=tile((128, 8), nl.bfloat16), predicate=mask)  # <- breaks


@broken(CASES, "indirect-view", target="trn3")
def indirect_second_operand():
    t, index = tile((16, 8)), tile((16, 1), nl.uint16)
    nisa.tensor_tensor(dst=tile((16, 16)), data1=tile((16, 16)), data2=t.indirect(index), op=nl.add)  # <- breaks


@broken(CASES, "bn-stats-size")
def bn_stats_of_513_elements():
    nisa.bn_stats(dst=tile((128, 6)), data=tile((128, 513)))  # <- breaks


@broken(CASES, "bn-stats-size")
def bn_aggr_of_four_elements():
    nisa.bn_aggr(dst=tile((128, 2)), data=tile((128, 4)))  # <- breaks


@broken(CASES, "max8-size")
def max8_of_seven_elements():
    nisa.max8(dst=tile((128, 8)), src=tile((128, 7)))  # <- breaks


@broken(CASES, "max8-size")
def find_seven_values():
    nisa.nc_find_index8(dst=tile((128, 8), nl.uint32), data=tile((128, 16)), vals=tile((128, 7)))  # <- breaks


@broken(CASES, "shuffle-mask")
def shuffle_mask_of_31():
    nisa.nc_stream_shuffle(dst=tile((32, 8)), src=tile((32, 8)), shuffle_mask=[0] * 31)  # <- breaks


@broken(CASES, "shuffle-mask")
def shuffle_from_partition_40():
    nisa.nc_stream_shuffle(dst=tile((32, 8)), src=tile((32, 8)), shuffle_mask=[40] + [0] * 31)  # <- breaks


@broken(CASES, "gather-size")
def local_gather_on_24_partitions():
    index = tile((24, 1), nl.uint16, value=0)
    nisa.local_gather(dst=tile((24, 16)), src_buffer=tile((24, 8)), index=index)  # <- breaks


@broken(CASES, "gather-size")
def local_gather_of_three_elements_per_index():
    index = tile((16, 1), nl.uint16, value=0)
    nisa.local_gather(tile((16, 48)), tile((16, 8)), index, num_elem_per_idx=3)  # <- breaks


@broken(CASES, "operand-dtype")
def gather_with_signed_indices():
    index = tile((128, 4), nl.int32, value=0)
    nisa.nc_n_gather(dst=tile((128, 4)), data=tile((128, 8)), indices=index)  # <- breaks


@broken(CASES, "dynamic-bounds", array([[8]] * 128, "uint32"), error=OutOfBoundsError)
def gather_beyond_the_tile(rows):
    index = load(rows)
    nisa.nc_n_gather(dst=tile((128, 1)), data=tile((128, 8)), indices=index)  # <- breaks


@broken(CASES, "iota-pattern")
def iota_of_the_wrong_size():
    nisa.iota(dst=nl.ndarray((128, 8), dtype=nl.int32, buffer=nl.sbuf), pattern=[[1, 7]])  # <- breaks


@broken(CASES, "range-select-false-value")
def range_select_with_zero_elsewhere():
    bound = tile((128, 1))
    t = tile((128, 8))
    nisa.range_select(t, t, nl.greater_equal, nl.less, bound, bound, on_false_value=0.0)  # <- breaks


@broken(CASES, "topk-size")
def topk_of_more_than_there_are():
    v, i = tile((16, 17), nl.bfloat16), tile((16, 17), nl.uint32)
    nisa.topk(val_dst=v, idx_dst=i, src=tile((16, 1), nl.bfloat16), n=16)  # <- breaks


@broken(CASES, "nonzero-size")
def nonzero_without_room_for_the_count():
    nisa.nonzero_with_count(dst=tile((128, 8), nl.int32), src=tile((128, 8)))  # <- breaks


@broken(CASES, "sequence-bounds-shape")
def sequence_bounds_on_two_partitions():
    nisa.sequence_bounds(dst=tile((2, 2, 8)), segment_ids=tile((2, 8)))  # <- breaks


@broken(CASES, "random-range", target="trn3")
def empty_random_range():
    nisa.rand2(dst=tile((128, 8)), min=1.0, max=1.0)  # <- breaks


@broken(CASES, "rng-state-size")
def random_state_of_five_words():
    nisa.rand_set_state(tile((128, 5), nl.uint32))  # <- breaks
