"""GpSimd Engine instructions against their float64 or integer evaluation, over shapes, dtypes and views in SBUF."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import dtypes, gpsimd, operators, vector
from .tiles import (
    FLOATS,
    INTEGERS,
    any_dtype,
    any_float,
    any_integer,
    cases,
    close,
    empty,
    host,
    in_sbuf,
    load,
    partition_counts,
    read_in_sbuf,
    run,
    same,
    sample,
    sample_bits,
    seeds,
    shapes,
)

cores = st.sampled_from((16, 32, 48, 112, 128))
INTEGER_OPERATORS = ("add", "subtract", "multiply", "maximum", "minimum", "equal", "less", "greater_equal")


def op(name):
    return getattr(nl, name)


@given(
    st.sampled_from(INTEGER_OPERATORS), st.sampled_from(("int32", "uint32")), shapes, read_in_sbuf, read_in_sbuf,
    in_sbuf, seeds,
)  # fmt: skip
@cases
def test_tensor_tensor_of_32_bit_integers_is_exact(name, dtype, shape, first, second, target, seed):
    x, y = sample_bits(seed, shape, dtype, first), sample_bits(seed + 1, shape, dtype, second)

    def body(a, b):
        dst = empty(shape, dtype, target)
        nisa.tensor_tensor(dst, load(a, dtype, first), load(b, dtype, second), op(name))
        return [dst]

    same(run(body, host(x, dtype), host(y, dtype))[0], gpsimd.tensor_tensor_int32(x, y, name, dtype), dtype)


@given(st.sampled_from(("add", "power")), any_float, any_float, any_float, shapes, read_in_sbuf, in_sbuf, seeds)
@cases
def test_tensor_tensor_of_floats(name, left, right, result, shape, source, target, seed):
    x, y = sample(seed, shape, left, 0.5, 2.0, source), sample(seed + 1, shape, right, -2.0, 2.0)

    def body(a, b):
        dst = empty(shape, result, target)
        nisa.tensor_tensor(dst, load(a, left, source), load(b, right), op(name), nisa.engine.gpsimd)
        return [dst]

    close(run(body, host(x, left), host(y, right))[0], vector.tensor_tensor(x, y, name), result)


@given(any_float, any_float, shapes, read_in_sbuf, in_sbuf, seeds)
@cases
def test_reverse_square_root(dtype, result, shape, source, target, seed):
    x = sample(seed, shape, dtype, 0.5, 4.0, source)

    def body(a):
        dst = empty(shape, result, target)
        nisa.tensor_scalar(dst, load(a, dtype, source), nl.rsqrt, 0.0)
        return [dst]

    close(run(body, host(x, dtype))[0], vector.tensor_scalar(x, "rsqrt", None), result)


patterns = st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 4)).map(list), min_size=1, max_size=4)


@given(patterns, partition_counts, st.integers(-(2**20), 2**20), st.integers(-300, 300), any_dtype, in_sbuf)
@cases
def test_iota(pattern, partitions, offset, multiplier, dtype, target):
    shape = (partitions, math.prod(num for _, num in pattern))

    def body(_):
        dst = empty(shape, dtype, target)
        nisa.iota(dst, pattern, offset, multiplier)
        return [dst]

    expected = gpsimd.iota(partitions, pattern, offset, multiplier).reshape(shape)
    got = run(body, np.zeros((1, 1), np.float32))[0]
    same(got, operators.wrap_integer(expected, dtype) if dtype == "uint32" else expected, dtype)


COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


@given(patterns, partition_counts, st.sampled_from(COMPARISONS), any_dtype, any_dtype, read_in_sbuf, in_sbuf, seeds)
@cases
def test_affine_select(pattern, partitions, comparison, dtype, result, source, target, seed):
    shape = (partitions, math.prod(num for _, num in pattern))
    x = sample(seed, shape, dtype, place=source)

    def body(a):
        dst = empty(shape, result, target)
        nisa.affine_select(dst, pattern, 2, load(a, dtype, source), 3.0, op(comparison), offset=-3)
        return [dst]

    same(run(body, host(x, dtype))[0], gpsimd.affine_select(pattern, 2, x, 3.0, comparison, -3), result)


# Gathers.


@given(any_dtype, shapes, shapes, read_in_sbuf, in_sbuf, in_sbuf, seeds)
@cases
def test_nc_n_gather(dtype, shape, wanted, source, where, target, seed):
    wanted = (shape[0], *wanted[1:])
    x = sample_bits(seed, shape, dtype, source) if dtype in INTEGERS else sample(seed, shape, dtype, place=source)
    places = np.random.default_rng(seed).integers(0, math.prod(shape[1:]), wanted)

    def body(a, b):
        dst = empty(wanted, dtype, target)
        nisa.nc_n_gather(dst, load(a, dtype, source), load(b, "uint32", where))
        return [dst]

    same(run(body, host(x, dtype), host(places, "uint32"))[0], gpsimd.nc_n_gather(x, places), dtype)


@given(
    any_dtype, cores, st.integers(1, 4), st.sampled_from((1, 2, 4, 8, 16, 32)), st.integers(0, 15), read_in_sbuf,
    in_sbuf, in_sbuf, seeds,
)  # fmt: skip
@cases
def test_local_gather(dtype, partitions, columns, length, unused, source, where, target, seed):
    x = sample(seed, (partitions, 40), dtype, place=source)
    places = np.random.default_rng(seed).integers(0, 41 - length, (partitions, columns))
    valid = 16 * columns - unused if unused else None

    def body(a, b):
        dst = empty((partitions, (valid or 16 * columns) * length), dtype, target)
        nisa.local_gather(dst, load(a, dtype, source), load(b, "uint16", where), length, valid)
        return [dst]

    same(run(body, host(x, dtype), host(places, "uint16"))[0], gpsimd.local_gather(x, places, length, valid), dtype)


# Across partitions and along them.


@given(st.sampled_from(("add", "average", "maximum")), any_dtype, any_float, shapes, read_in_sbuf, in_sbuf, seeds)
@cases
def test_tensor_partition_reduce(name, dtype, result, shape, source, target, seed):
    x = sample(seed, shape, dtype, place=source)

    def body(a):
        dst = empty((1, *shape[1:]), result, target)
        nisa.tensor_partition_reduce(dst, op(name), load(a, dtype, source))
        return [dst]

    expected = gpsimd.tensor_partition_reduce(name, x)
    size = np.abs(x).sum(0, keepdims=True)
    close(run(body, host(x, dtype))[0], expected, result, steps=shape[0], magnitude=size)


@given(st.sampled_from(("bitwise_or", "bitwise_and")), any_integer, shapes, read_in_sbuf, in_sbuf, seeds)
@cases
def test_tensor_partition_reduce_on_bits(name, dtype, shape, source, target, seed):
    x = sample_bits(seed, shape, dtype, source)

    def body(a):
        dst = empty((1, *shape[1:]), dtype, target)
        nisa.tensor_partition_reduce(dst, op(name), load(a, dtype, source))
        return [dst]

    expected = operators.wrap_integer(gpsimd.tensor_partition_reduce(name, x), dtype)
    same(run(body, host(x, dtype))[0], expected, dtype)


@given(st.sampled_from(("float32", "int32")), st.sampled_from(("float32", "int32")), st.integers(1, 60), in_sbuf, seeds)
@cases
def test_sequence_bounds(dtype, result, n, place, seed):
    ids = np.random.default_rng(seed).integers(0, 4, (1, n))
    ids = np.repeat(ids, 3, 1)[:, :n]

    def body(a):
        dst = empty((1, 2, n), result, place)
        nisa.sequence_bounds(dst, load(a, dtype, place))
        return [dst]

    same(run(body, host(ids, dtype))[0], gpsimd.sequence_bounds(ids), result)


@given(
    st.sampled_from(("float32", "int32")), partition_counts, st.integers(1, 40), st.integers(-50, 2**20),
    st.integers(-9, 9), in_sbuf, in_sbuf, seeds,
)  # fmt: skip
@cases
def test_nonzero_with_count(dtype, partitions, elements, offset, padding, source, target, seed):
    random = np.random.default_rng(seed)
    x = random.integers(0, 3, (partitions, elements)) * 0.5 if dtype == "float32" else \
        random.integers(-1, 2, (partitions, elements))  # fmt: skip
    before = random.integers(-99, 99, (partitions, elements + 1))

    def body(a, b):
        dst = load(b, "int32", target)
        nisa.nonzero_with_count(dst, load(a, dtype, source), offset, padding)
        return [dst]

    got = run(body, host(x, dtype), host(before, "int32"))[0]
    same(got, gpsimd.nonzero_with_count(before, x, offset, padding), "int32")


def test_the_documented_examples_of_bounds_and_of_nonzero_positions():
    def body(a, b):
        bounds, places = empty((1, 2, 9), "int32"), empty((1, 9), "int32")
        nisa.sequence_bounds(bounds, load(a, "int32"))
        nisa.nonzero_with_count(places, load(b, "int32"), 16, -1)
        return [bounds, places]

    ids, marks = [[0, 1, 1, 2, 2, 2, 0, 3, 3]], [[0, 1, 1, 0, 0, 1, 0, 0]]
    bounds, places = run(body, host(ids, "int32"), host(marks, "int32"))
    np.testing.assert_array_equal(bounds, [[[9, 1, 1, 3, 3, 3, 9, 7, 7], [-1, 3, 3, 6, 6, 6, -1, 9, 9]]])
    np.testing.assert_array_equal(places, [[17, 18, 21, -1, -1, -1, -1, -1, 3]])


def test_nonzero_with_count_leaves_other_partitions_alone():
    def body(a):
        src, dst = nl.ndarray((32, 4), nl.float32), nl.ndarray((32, 5), nl.int32)
        for partition in (0, 16):
            nisa.dma_copy(src[partition : partition + 1], a)
        nisa.nonzero_with_count(dst, src)
        out = nl.ndarray((2, 5), nl.int32)
        for i, partition in enumerate((0, 16)):
            nisa.dma_copy(out[i : i + 1], dst[partition : partition + 1])
        return [out]

    got = run(body, np.float32([[0, 1, 0, 2]]))[0]
    np.testing.assert_array_equal(got, [[1, 3, -1, -1, 2]] * 2)


@given(cores, st.integers(8, 200), st.integers(1, 40), st.integers(0, 2), st.booleans(), in_sbuf, in_sbuf, seeds)
@cases
def test_topk(partitions, n, k, spare, dense, source, target, seed):
    assume(k <= n)
    x = sample(seed, (partitions, -(-n // 16) + spare), "bfloat16")
    x = np.rint(x) if dense else x

    def body(a):
        values, places = empty((partitions, k), "bfloat16", target), empty((partitions, k), "uint32", target)
        nisa.topk(values, places, load(a, "bfloat16", source), n)
        return [values, places]

    for got, expected, dtype in zip(
        run(body, host(x, "bfloat16")), gpsimd.topk(x, n, k), ("bfloat16", "uint32"), strict=True
    ):
        same(got, expected, dtype)


@given(any_dtype, any_dtype, shapes, read_in_sbuf, in_sbuf, seeds)
@cases
def test_tensor_copy(source, result, shape, src, dst, seed):
    x = sample(seed, shape, source, -300.0, 300.0, src)

    def body(a):
        target = empty(shape, result, dst)
        nisa.tensor_copy(target, load(a, source, src), nisa.engine.gpsimd)
        return [target]

    same(run(body, host(x, source))[0], dtypes.convert(x, source, result), result)


@given(any_dtype, shapes, in_sbuf, st.integers(0, 100))
@cases
def test_memset(dtype, shape, dst, value):
    def body(_):
        target = empty(shape, dtype, dst)
        nisa.memset(target, value / 8 if dtype in FLOATS else value, nisa.engine.gpsimd)
        return [target]

    expected = np.full(shape, value / 8 if dtype in FLOATS else value)
    same(run(body, np.zeros((1, 1), np.float32))[0], expected, dtype)
