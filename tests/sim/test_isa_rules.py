"""Documented constraints of the Vector, Scalar and GpSimd instructions, one broken at a time.

The corpus breaks each rule once; here are the other ways of each instruction to break it, and what stays legal.
"""

from __future__ import annotations

import numpy as np
import pytest

from nki_parallel_attn.sim import NkiValidationError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .corpus.kernel_helpers import tile

command = nisa.reduce_cmd
FP32_MIN = -3.4028235e38


def t(*shape, dtype=nl.float32, buffer=nl.sbuf, value=1):
    return tile(shape, dtype, value, buffer)


def psum(*shape, dtype=nl.float32):
    return tile(shape, dtype, 1, nl.psum)


def u8(*shape):
    return t(*shape, dtype=nl.uint8)


def u32(*shape):
    return t(*shape, dtype=nl.uint32, value=0)


def range_select(dst=None, data=None, **kwargs):
    bound = t(32, 1)
    arguments = {
        "comp_op0": nl.greater_equal, "comp_op1": nl.less, "bound0": bound, "bound1": bound, "on_false_value": FP32_MIN
    } | kwargs  # fmt: skip
    nisa.range_select(dst or t(32, 8), data or t(32, 8), **arguments)


def select_reduce(on_true=None, predicate=None, on_false=0.0, **kwargs):
    nisa.select_reduce(t(32, 8), predicate or u8(32, 8), on_true or t(32, 8), on_false, **kwargs)


def scalar_reduce(*args, **kwargs):
    nisa.tensor_scalar_reduce(t(32, 8), t(32, 8), *args, **kwargs)


def cumulative(*args, **kwargs):
    nisa.tensor_scalar_cumulative(t(32, 8), t(32, 8), *args, **kwargs)


def activate2(*pair, op=nl.exp, imm0=1.0, imm1=1.0, **kwargs):
    nisa.activate2(t(32, 8), op, t(32, 8), imm0, imm1, *pair, **kwargs)


def shuffle(dst, src, mask=None):
    nisa.nc_stream_shuffle(dst, src, mask or [0] * 32)


BROKEN = {
    # scalar_tensor_tensor and tensor_tensor_scan
    "bitvec in scalar_tensor_tensor": (
        "operator", lambda: nisa.scalar_tensor_tensor(t(32, 8), t(32, 8), nl.bitwise_and, 1, nl.add, t(32, 8))),
    "unary second operator": (
        "operator", lambda: nisa.scalar_tensor_tensor(t(32, 8), t(32, 8), nl.add, 1.0, nl.abs, t(32, 8))),
    "second operand that is a number": (
        "tensor-operand", lambda: nisa.scalar_tensor_tensor(t(32, 8), t(32, 8), nl.add, 1.0, nl.add, 2.0)),
    "data and operand1 in PSUM": (
        "both-in-psum",
        lambda: nisa.scalar_tensor_tensor(t(32, 8), psum(32, 8), nl.add, 1.0, nl.add, psum(32, 8))),
    "operand1 of another size": (
        "same-elements", lambda: nisa.scalar_tensor_tensor(t(32, 8), t(32, 8), nl.add, 1.0, nl.add, t(32, 9))),
    "bitvec scan": (
        "operator", lambda: nisa.tensor_tensor_scan(t(32, 8), t(32, 8), t(32, 8), 0.0, nl.bitwise_or, nl.add)),
    "unary scan": ("operator", lambda: nisa.tensor_tensor_scan(t(32, 8), t(32, 8), t(32, 8), 0.0, nl.abs, nl.add)),
    "initial of two columns": (
        "vector-operand", lambda: nisa.tensor_tensor_scan(t(32, 8), t(32, 8), t(32, 8), t(32, 2), nl.add, nl.add)),
    "no initial": (
        "scalar-operand", lambda: nisa.tensor_tensor_scan(t(32, 8), t(32, 8), t(32, 8), None, nl.add, nl.add)),
    # tensor_scalar_reduce
    "bitvec reduced": ("operator", lambda: scalar_reduce(nl.bitwise_and, 1, nl.add)),
    "reduced by subtraction": ("operator", lambda: scalar_reduce(nl.add, 1.0, nl.subtract)),
    "reversed and reduced": ("operator", lambda: scalar_reduce(nl.subtract, 1.0, nl.add, reverse0=True)),
    "reduce_init without load_reduce": (
        "reduce-register", lambda: scalar_reduce(nl.add, 1.0, nl.add, reduce_init=0.0)),
    "idle tensor_scalar_reduce": (
        "reduce-register", lambda: scalar_reduce(nl.add, 1.0, nl.add, reduce_cmd=command.idle)),
    "bfloat16 operand0": (
        "operand-dtype", lambda: scalar_reduce(nl.add, t(32, 1, dtype=nl.bfloat16), nl.add)),
    "bfloat16 reduce_init": (
        "operand-dtype",
        lambda: scalar_reduce(
            nl.add, 1.0, nl.add, reduce_cmd=command.load_reduce, reduce_init=t(32, 1, dtype=nl.bfloat16))),
    "reduce_cmd as a number": ("enum-argument", lambda: scalar_reduce(nl.add, 1.0, nl.add, reduce_cmd=3)),
    "result of 64 partitions": ("vector-operand", lambda: scalar_reduce(nl.add, 1.0, nl.add, t(64, 1))),
    # tensor_scalar_cumulative
    "cumulative bitvec": ("operator", lambda: cumulative(nl.bitwise_and, nl.add, 1)),
    "cumulative comparison": ("operator", lambda: cumulative(nl.add, nl.less, 0.0)),
    "imm1 without load_reduce": ("reduce-register", lambda: cumulative(nl.add, nl.add, 0.0, 1.0)),
    "load_reduce without imm1": (
        "reduce-register", lambda: cumulative(nl.add, nl.add, 0.0, reduce_cmd=command.load_reduce)),
    "cumulative that continues nothing": (
        "reduce-register", lambda: cumulative(nl.add, nl.add, 0.0, reduce_cmd=command.reduce)),
    "bfloat16 imm0": ("operand-dtype", lambda: cumulative(nl.add, nl.add, t(32, 1, dtype=nl.bfloat16))),
    # exponential
    "exponential of five dimensions": (
        "access-pattern-dims", lambda: nisa.exponential(t(4, 2, 2, 2, 2), t(4, 2, 2, 2, 2))),
    "exponential into uint32": ("operand-dtype", lambda: nisa.exponential(u32(32, 8), t(32, 8))),
    "exponential of tfloat32": (
        "operand-dtype", lambda: nisa.exponential(t(32, 8), t(32, 8, dtype=nl.tfloat32))),
    "sum of exponentials in int32": (
        "operand-dtype",
        lambda: nisa.exponential(t(32, 8), t(32, 8), 0.0, t(32, 1, dtype=nl.int32), command.reset_reduce)),
    "bfloat16 maximum": (
        "operand-dtype", lambda: nisa.exponential(t(32, 8), t(32, 8), t(32, 1, dtype=nl.bfloat16))),
    "initial value without load_reduce": (
        "reduce-register",
        lambda: nisa.exponential(t(32, 8), t(32, 8), reduce_cmd=command.reset_reduce, reduce_init=1.0)),
    "exponential that only resets": (
        "reduce-register", lambda: nisa.exponential(t(32, 8), t(32, 8), reduce_cmd=command.reset)),
    "reading what idle left": (
        "reduce-register", lambda: nisa.exponential(t(32, 8), t(32, 8), reduce_res=t(32, 1))),
    # tensor_copy_predicated, select_reduce, range_select
    "predicated copy of nothing": (
        "scalar-operand", lambda: nisa.tensor_copy_predicated(t(32, 8), None, u8(32, 8))),
    "source and predicate in PSUM": (
        "both-in-psum",
        lambda: nisa.tensor_copy_predicated(t(32, 8), psum(32, 8), psum(32, 8, dtype=nl.uint8))),
    "signed predicate": (
        "operand-dtype", lambda: nisa.tensor_copy_predicated(t(32, 8), 0.0, t(32, 8, dtype=nl.int8))),
    "predicate of another size": ("same-elements", lambda: nisa.tensor_copy_predicated(t(32, 8), 0.0, u8(32, 9))),
    "select of int32": ("operand-dtype", lambda: select_reduce(t(32, 8, dtype=nl.int32))),
    "select of tfloat32": ("operand-dtype", lambda: select_reduce(t(32, 8, dtype=nl.tfloat32))),
    "select by uint32": ("operand-dtype", lambda: select_reduce(predicate=u32(32, 8))),
    "select with both in PSUM": (
        "both-in-psum", lambda: select_reduce(psum(32, 8), psum(32, 8, dtype=nl.uint8))),
    "select reduced by minimum": ("operator", lambda: select_reduce(reduce_op=nl.minimum)),
    "select that loads": ("reduce-register", lambda: select_reduce(reduce_cmd=command.load_reduce)),
    "select into an integer result": (
        "operand-dtype",
        lambda: select_reduce(reduce_cmd=command.reset_reduce, reduce_res=t(32, 1, dtype=nl.int32))),
    "select that reads what idle left": ("reduce-register", lambda: select_reduce(reduce_res=t(32, 1))),
    "on_false of two columns": ("vector-operand", lambda: select_reduce(on_false=t(32, 2))),
    "range of integers": ("operand-dtype", lambda: range_select(data=t(32, 8, dtype=nl.int16))),
    "bound that is a number": ("tensor-operand", lambda: range_select(bound0=3.0)),
    "bound in bfloat16": ("operand-dtype", lambda: range_select(bound1=t(32, 1, dtype=nl.bfloat16))),
    "range reduced by add": ("operator", lambda: range_select(reduce_op=nl.add)),
    "range that loads": ("reduce-register", lambda: range_select(reduce_cmd=command.load_reduce)),
    "indices beyond 2^24": ("range-select-index", lambda: range_select(range_start=2**24 - 6)),
    # Statistics and search
    "bn_stats into five": ("bn-stats-size", lambda: nisa.bn_stats(t(32, 5), t(32, 8))),
    "bn_aggr into six": ("bn-stats-size", lambda: nisa.bn_aggr(t(32, 6), t(32, 6))),
    "bn_stats of other partitions": ("same-partitions", lambda: nisa.bn_stats(t(32, 6), t(64, 8))),
    "max8 of four dimensions": ("max8-size", lambda: nisa.max8(t(32, 8), t(32, 2, 2, 2))),
    "max8 of 16385": ("max8-size", lambda: nisa.max8(t(32, 8), t(32, 16385, dtype=nl.uint8))),
    "max8 into nine": ("max8-size", lambda: nisa.max8(t(32, 9), t(32, 16))),
    "indices in int32": (
        "operand-dtype", lambda: nisa.nc_find_index8(t(32, 8, dtype=nl.int32), t(32, 16), t(32, 8))),
    "replacing seven values": ("max8-size", lambda: nisa.nc_match_replace8(t(32, 16), t(32, 16), t(32, 7), 0.0)),
    "replacing by a tensor": (
        "scalar-operand", lambda: nisa.nc_match_replace8(t(32, 16), t(32, 16), t(32, 8), t(32, 1))),
    "replaced positions in int32": (
        "operand-dtype",
        lambda: nisa.nc_match_replace8(t(32, 16), t(32, 16), t(32, 8), 0.0, t(32, 8, dtype=nl.int32))),
    # Shuffle and gathers
    "shuffle that casts": ("matching-dtype", lambda: shuffle(t(32, 8), t(32, 8, dtype=nl.bfloat16))),
    "shuffle of other sizes": ("same-elements", lambda: shuffle(t(32, 8), t(32, 9))),
    "shuffle beyond the source": ("shuffle-mask", lambda: shuffle(t(64, 8), t(32, 8))),
    "shuffle of 64 into partition 32": (
        "shuffle-start-partition", lambda: shuffle(t(128, 8)[32:64], t(128, 8)[0:64])),
    "shuffle of 96 from partition 32": (
        "shuffle-start-partition", lambda: shuffle(t(128, 8)[0:96], t(128, 8)[32:128])),
    "gather that casts": (
        "matching-dtype", lambda: nisa.nc_n_gather(t(32, 4), t(32, 8, dtype=nl.bfloat16), u32(32, 4))),
    "gather of other sizes": ("same-elements", lambda: nisa.nc_n_gather(t(32, 5), t(32, 8), u32(32, 4))),
    "gather from PSUM": ("memory-access", lambda: nisa.nc_n_gather(t(32, 4), psum(32, 8), u32(32, 4))),
    "local gather that casts": (
        "matching-dtype",
        lambda: nisa.local_gather(t(16, 16), t(16, 8, dtype=nl.int32), t(16, 1, dtype=nl.uint16))),
    "local gather of other sizes": (
        "same-elements", lambda: nisa.local_gather(t(16, 15), t(16, 8), t(16, 1, dtype=nl.uint16))),
    "local gather of too many valid indices": (
        "gather-size", lambda: nisa.local_gather(t(16, 17), t(16, 8), t(16, 1, dtype=nl.uint16), 1, 17)),
    "local gather of 4112 indices": (
        "gather-size", lambda: nisa.local_gather(t(16, 4112), t(16, 8), t(16, 257, dtype=nl.uint16))),
    "local gather beyond the tile": (
        "dynamic-bounds", lambda: nisa.local_gather(t(16, 32), t(16, 2), t(16, 1, dtype=nl.uint16), 2)),
    # GpSimd
    "partition reduction by minimum": (
        "operator", lambda: nisa.tensor_partition_reduce(t(1, 8), nl.minimum, t(32, 8))),
    "partition reduction into two": (
        "same-partitions", lambda: nisa.tensor_partition_reduce(t(2, 8), nl.add, t(32, 8))),
    "partition reduction of other sizes": (
        "same-elements", lambda: nisa.tensor_partition_reduce(t(1, 9), nl.add, t(32, 8))),
    "partition reduction of float bits": (
        "bitvec-integer", lambda: nisa.tensor_partition_reduce(t(1, 8), nl.bitwise_or, t(32, 8))),
    "partition reduction of PSUM": (
        "memory-access", lambda: nisa.tensor_partition_reduce(t(1, 8), nl.add, psum(32, 8))),
    "segment ids in int16": (
        "operand-dtype", lambda: nisa.sequence_bounds(t(1, 2, 8), t(1, 8, dtype=nl.int16))),
    "bounds without their dimension": ("sequence-bounds-shape", lambda: nisa.sequence_bounds(t(1, 16), t(1, 8))),
    "nonzero of bfloat16": (
        "operand-dtype", lambda: nisa.nonzero_with_count(t(16, 9, dtype=nl.int32), t(16, 8, dtype=nl.bfloat16))),
    "nonzero into float32": ("operand-dtype", lambda: nisa.nonzero_with_count(t(16, 9), t(16, 8))),
    "nonzero with a fractional padding": (
        "integer", lambda: nisa.nonzero_with_count(t(16, 9, dtype=nl.int32), t(16, 8), 0, 0.5)),
    "topk of float32": (
        "operand-dtype", lambda: nisa.topk(t(16, 4, dtype=nl.bfloat16), u32(16, 4), t(16, 1), 16)),
    "topk of seven": (
        "topk-size",
        lambda: nisa.topk(t(16, 4, dtype=nl.bfloat16), u32(16, 4), t(16, 1, dtype=nl.bfloat16), 7)),
    "topk on 24 partitions": (
        "topk-size",
        lambda: nisa.topk(t(24, 4, dtype=nl.bfloat16), u32(24, 4), t(24, 1, dtype=nl.bfloat16), 16)),
    "topk of a source that is too narrow": (
        "topk-size",
        lambda: nisa.topk(t(16, 4, dtype=nl.bfloat16), u32(16, 4), t(16, 1, dtype=nl.bfloat16), 17)),
    # Scalar
    "activation that loads": (
        "reduce-register",
        lambda: nisa.activation(t(32, 8), nl.exp, t(32, 8), reduce_op=nl.add, reduce_cmd=command.load_reduce)),
    "activation that reduces by nothing": (
        "reduce-register", lambda: nisa.activation(t(32, 8), nl.exp, t(32, 8), reduce_cmd=command.reset_reduce)),
    "activation that reads what nothing set": (
        "reduce-register", lambda: nisa.activation(t(32, 8), nl.exp, t(32, 8), reduce_res=t(32, 1))),
    "scale in bfloat16": (
        "operand-dtype", lambda: nisa.activation(t(32, 8), nl.exp, t(32, 8), scale=t(32, 1, dtype=nl.bfloat16))),
    "bias in tfloat32": (
        "operand-dtype", lambda: nisa.activation(t(32, 8), nl.exp, t(32, 8), t(32, 1, dtype=nl.tfloat32))),
    "activation_reduce by minimum": (
        "reduce-register", lambda: nisa.activation_reduce(t(32, 8), nl.exp, t(32, 8), nl.minimum, t(32, 1))),
    "activate2 with add and add": ("operator", lambda: activate2(nl.add, nl.add)),
    "activate2 with only the second operator": ("operator", lambda: activate2(nl.bypass, nl.add)),
    "activate2 reversed without an operator": (
        "operator", lambda: activate2(nl.multiply, nl.bypass, reverse1=True)),
    "activate2 with immediates of two dtypes": (
        "matching-dtype",
        lambda: activate2(nl.multiply, nl.add, imm0=t(32, 1), imm1=t(32, 1, dtype=nl.bfloat16))),
    "activate2 reduced by multiply": (
        "operator",
        lambda: activate2(nl.multiply, nl.add, reduce_op=nl.multiply, reduce_cmd=command.reset_reduce)),
    "activate2 that reduces by nothing": (
        "reduce-register", lambda: activate2(nl.multiply, nl.add, reduce_cmd=command.reduce)),
    "activate2 that loads": (
        "reduce-register", lambda: activate2(nl.multiply, nl.add, reduce_cmd=command.load_reduce)),
    "activate2 of a binary operator": ("operator", lambda: activate2(nl.multiply, nl.add, op=nl.multiply)),
    "activate2 beyond the range": ("activation-range", lambda: activate2(nl.multiply, nl.add, op=nl.sin, imm1=5.0)),
    "reduction by abs_max": ("operator", lambda: nisa.tensor_reduce(t(32, 1), nl.abs_max, t(32, 8), 1)),
    # Random numbers
    "random bits on the Scalar Engine": ("engine-choice", lambda: nisa.rng(u32(32, 8), nisa.engine.scalar)),
    "random bits of GpSimd into PSUM": (
        "memory-access", lambda: nisa.rng(psum(32, 8, dtype=nl.int32), nisa.engine.gpsimd)),
    "dropout that casts": ("matching-dtype", lambda: nisa.dropout(t(32, 8), t(32, 8, dtype=nl.bfloat16), 0.5)),
    "dropout of integers by a bfloat16 rate": (
        "operand-dtype", lambda: nisa.dropout(u32(32, 8), u32(32, 8), t(32, 1, dtype=nl.bfloat16))),
    "dropout by an integer rate": (
        "operand-dtype", lambda: nisa.dropout(t(32, 8), t(32, 8), t(32, 1, dtype=nl.int32))),
    "seed of two": ("rng-state-size", lambda: nisa.set_rng_seed(u32(1, 2))),
    "seed of 16 bits": ("operand-dtype", lambda: nisa.set_rng_seed(t(1, 1, dtype=nl.uint16))),
    "state of int32": ("operand-dtype", lambda: nisa.rand_set_state(t(32, 6, dtype=nl.int32))),
    "state of the Vector Engine on GpSimd": ("rng-state-size", lambda: nisa.rand_get_state(u32(32, 24))),
    "state of GpSimd on the Vector Engine": (
        "rng-state-size", lambda: nisa.rand_set_state(u32(32, 6), nisa.engine.vector)),
    "rand2 into float8_e4m3fn": (
        "operand-dtype", lambda: nisa.rand2(t(32, 8, dtype=nl.float8_e4m3fn), 0.0, 1.0)),
    "rand2 between bfloat16 bounds": (
        "operand-dtype", lambda: nisa.rand2(t(32, 8), t(32, 1, dtype=nl.bfloat16), 9.0)),
    "rand2 between bounds that are empty in one partition": (
        "random-range", lambda: nisa.rand2(t(32, 8), t(32, 1), 1.0)),
    "rand2 below two columns": ("vector-operand", lambda: nisa.rand2(t(32, 8), 0.0, t(32, 2))),
    # Packed elements have no value
    "packed elements in arithmetic": (
        "operand-dtype", lambda: nisa.reciprocal(t(32, 8), t(32, 8, dtype=nl.float8_e4m3fn_x4, value=0))),
}  # fmt: skip

ON_TRN2 = {
    "state of the Vector Engine": (
        "engine-choice", lambda: nisa.rand_get_state(u32(32, 24), nisa.engine.vector)),
    "activate2": ("target", lambda: activate2(nl.multiply, nl.add)),
    "abs_min": ("target", lambda: nisa.tensor_scalar(t(32, 8), t(32, 8), nl.abs_min, 1.0)),
}  # fmt: skip


def fails(rule, body, target):
    with pytest.raises(NkiValidationError) as caught:
        simulate(lambda: body(), target=target)()
    assert caught.value.rule == rule, caught.value


@pytest.mark.parametrize("name", BROKEN)
def test_broken_on_trn3(name):
    fails(*BROKEN[name], "trn3")


@pytest.mark.parametrize("name", ON_TRN2)
def test_broken_on_trn2(name):
    fails(*ON_TRN2[name], "trn2")


LEGAL = {
    "range select on trn2": ("trn2", range_select),
    "range select by its default value": (
        "trn2", lambda: nisa.range_select(t(32, 8), t(32, 8), nl.less, nl.less, t(32, 1), t(32, 1))),
    "last index of 2^24": ("trn3", lambda: range_select(range_start=2**24 - 7)),
    "idle range select": ("trn3", lambda: range_select(reduce_cmd=command.idle)),
    "bool predicates": (
        "trn2", lambda: nisa.tensor_copy_predicated(t(32, 8), 0.0, t(32, 8, dtype=nl.bool_))),
    "shuffle of 64 into 64": ("trn2", lambda: shuffle(t(128, 8)[64:128], t(128, 8)[0:64])),
    "shuffle of 32 into partition 96": ("trn2", lambda: shuffle(t(128, 8)[96:128], t(128, 8)[32:64])),
    "shuffle that keeps all": ("trn2", lambda: shuffle(t(32, 8), t(32, 8), [255] * 32)),
    "random bits of GpSimd": ("trn2", lambda: nisa.rng(u32(32, 8), nisa.engine.gpsimd)),
    "random state of GpSimd": ("trn2", lambda: nisa.rand_get_state(u32(128, 6))),
    "4096 indices": ("trn2", lambda: nisa.local_gather(t(16, 4096), t(16, 8), t(16, 256, dtype=nl.uint16))),
    "max8 of 16384": ("trn2", lambda: nisa.max8(t(32, 8), t(32, 16384, dtype=nl.uint8))),
    "exponential of four dimensions": ("trn3", lambda: nisa.exponential(t(4, 2, 2, 2), t(4, 2, 2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name):
    target, body = LEGAL[name]
    simulate(lambda: body(), target=target)()


@pytest.mark.parametrize(("target", "version"), [("trn2", nisa.nc_version.gen3), ("trn3", nisa.nc_version.gen4)])
def test_a_kernel_knows_its_generation(target, version):
    def kernel():
        assert nisa.get_nc_version() is version
        assert nisa.get_nc_sub_version() == 0

    simulate(kernel, target=target)()


# Registers.


def test_an_idle_instruction_of_the_vector_engine_leaves_the_registers_undefined():
    def body():
        nisa.tensor_scalar_reduce(t(32, 8), t(32, 8), nl.add, 0.0, nl.add)
        nisa.select_reduce(t(32, 8), u8(32, 8), t(32, 8), 0.0)
        nisa.tensor_scalar_reduce(t(32, 8), t(32, 8), nl.add, 0.0, nl.add, reduce_cmd=command.reduce)

    fails("reduce-register", body, "trn3")


def test_engines_have_their_own_registers_and_the_vector_instructions_share_them():
    def kernel():
        total = nl.ndarray((32, 1), nl.float32)
        nisa.tensor_scalar_reduce(t(32, 8), t(32, 8), nl.add, 0.0, nl.add)
        nisa.activation(t(32, 8), nl.copy, t(32, 8), reduce_op=nl.add, reduce_cmd=command.reset_reduce)
        nisa.tensor_scalar_cumulative(t(32, 8), t(32, 8), nl.add, nl.add, 0.0, reduce_cmd=command.reduce)
        nisa.exponential(t(32, 8), t(32, 8), 1.0, total, command.reduce)
        out = nl.ndarray((32, 1), nl.float32, nl.shared_hbm)
        nl.store(out, total)
        return out

    np.testing.assert_array_equal(simulate(kernel, target="trn3")(), np.full((32, 1), 24.0))


# What an instruction writes and reads.


def partial(read):
    def body():
        dst = nl.ndarray((32, 8), nl.float32)
        predicate = u8(32, 8)
        nisa.memset(predicate[:, 4:8], 0)
        nisa.tensor_copy_predicated(dst, 5.0, predicate)
        nisa.tensor_copy(t(32, 4), dst[:, read])

    return body


def test_a_predicated_copy_writes_only_what_it_chooses():
    simulate(partial(slice(0, 4)))()
    fails("uninitialised-read", partial(slice(1, 5)), "trn2")


def test_a_shuffle_writes_only_the_partitions_that_it_moves():
    def body(row):
        dst = nl.ndarray((32, 8), nl.float32)
        shuffle(dst, t(32, 8), [255] + [0] * 31)
        nisa.dma_copy(t(32, 8)[row : row + 1], dst[row : row + 1])

    simulate(lambda: body(1))()
    fails("uninitialised-read", lambda: body(0), "trn2")


@pytest.mark.parametrize("column", [1, 6])
def test_a_gather_reads_only_what_its_indices_name(column):
    def body():
        data = nl.ndarray((32, 8), nl.float32)
        nisa.memset(data[:, 0:4], 1.0)
        nisa.nc_n_gather(t(32, 4), data, t(32, 4, dtype=nl.uint32, value=column))
        nisa.local_gather(t(32, 16), data, t(32, 1, dtype=nl.uint16, value=column))

    if column < 4:
        simulate(body)()
    else:
        fails("uninitialised-read", body, "trn2")


def test_nonzero_reads_and_writes_every_sixteenth_partition():
    def body(row):
        src, dst = nl.ndarray((32, 4), nl.float32), nl.ndarray((32, 5), nl.int32)
        for start in (0, 16):
            nisa.dma_copy(src[start : start + 1], t(1, 4))
        nisa.nonzero_with_count(dst, src)
        nisa.dma_copy(t(32, 5, dtype=nl.int32)[row : row + 1], dst[row : row + 1])

    simulate(lambda: body(16))()
    fails("uninitialised-read", lambda: body(1), "trn2")
