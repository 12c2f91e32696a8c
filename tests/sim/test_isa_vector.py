"""Vector Engine instructions against their float64 evaluation, over shapes, dtypes and views in SBUF and PSUM."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import dtypes, operators, vector
from .tiles import (
    FLOATS,
    any_dtype,
    any_float,
    any_integer,
    cases,
    close,
    empty,
    host,
    in_sbuf,
    load,
    on_chip,
    partition_counts,
    read_in_sbuf,
    read_on_chip,
    run,
    same,
    sample,
    sample_bits,
    seeds,
    shapes,
)

BINARY = sorted(set(operators.ARITHMETIC) - {"power"})
SMOOTH = ("add", "subtract", "multiply", "maximum", "minimum")  # a rounding before them stays a rounding after
UNARY = ("abs", "square", "relu", "reciprocal")
command = nisa.reduce_cmd


def op(name):
    return getattr(nl, name)


def column(seed, partitions, vectors, low=-4.0, high=4.0):
    """A per-partition operand: [P, 1], or a float."""
    return sample(seed, (partitions, 1), low=low, high=high) if vectors else float(sample(seed, (), low=low, high=high))


def columns(given_values):
    """The operands that are arrays, as kernel arguments."""
    return [host(value, "float32") for value in given_values if isinstance(value, np.ndarray)]


def operands(given_values, loaded):
    """`given_values` with each array replaced by its tile."""
    loaded = list(loaded)
    return [load(loaded.pop(0), "float32") if isinstance(v, np.ndarray) else v for v in given_values]


# Copies.


@given(any_dtype, any_dtype, shapes, read_on_chip, on_chip, st.sampled_from(("vector", "scalar", "gpsimd")), seeds)
@cases
def test_tensor_copy(source, result, shape, src, dst, unit, seed):
    assume(unit != "gpsimd" or not (src.psum or dst.psum))
    x = sample(seed, shape, source, -300.0, 300.0, src)

    def body(a):
        target = empty(shape, result, dst)
        nisa.tensor_copy(target, load(a, source, src), getattr(nisa.engine, unit))
        return [target]

    same(run(body, host(x, source))[0], dtypes.convert(x, source, result), result)


@given(any_integer, shapes, read_on_chip, on_chip, seeds)
@cases
def test_tensor_copy_moves_all_bits_of_integers(dtype, shape, src, dst, seed):
    x = sample_bits(seed, shape, dtype, src)

    def body(a):
        target = empty(shape, dtype, dst)
        nisa.tensor_copy(target, load(a, dtype, src))
        return [target]

    same(run(body, host(x, dtype))[0], x, dtype)


@given(any_dtype, shapes, on_chip, st.sampled_from(("vector", "gpsimd", "unknown")), st.integers(-100, 100))
@cases
def test_memset(dtype, shape, dst, unit, value):
    assume(unit != "gpsimd" or not dst.psum)
    value = abs(value) if dtype.startswith("u") else value

    def body(_):
        target = empty(shape, dtype, dst)
        nisa.memset(target, value if dtype not in FLOATS else value / 8, getattr(nisa.engine, unit))
        return [target]

    same(run(body, np.zeros((1, 1), np.float32))[0], np.full(shape, value if dtype not in FLOATS else value / 8), dtype)


@given(
    any_dtype, st.sampled_from(("uint8", "uint16", "uint32")), st.booleans(), st.booleans(), shapes, read_on_chip,
    read_in_sbuf, on_chip, seeds,
)  # fmt: skip
@cases
def test_tensor_copy_predicated(dtype, mask, number, reverse, shape, source, where, target, seed):
    x, y = sample(seed, shape, dtype, place=source), sample(seed + 1, shape, dtype)
    chosen = np.random.default_rng(seed).integers(0, 2, shape) * np.random.default_rng(seed + 2).integers(1, 99, shape)
    chosen = np.repeat(chosen[..., :1], shape[-1], -1) if where.view == "broadcast" else chosen
    scalar = float(sample(seed + 3, (), dtype))

    def body(a, b, m):
        dst = load(b, dtype, target)
        src = scalar if number else load(a, dtype, source)
        nisa.tensor_copy_predicated(dst, src, load(m, mask, where), reverse)
        return [dst]

    got = run(body, host(x, dtype), host(y, dtype), host(chosen, mask))[0]
    same(got, vector.tensor_copy_predicated(y, scalar if number else x, chosen, reverse), dtype)


@given(
    st.sampled_from(("int8", "uint8", "int16", "uint16")), any_float, any_float, st.booleans(), st.booleans(), shapes,
    read_on_chip, read_in_sbuf, on_chip, seeds,
)  # fmt: skip
@cases
def test_select_reduce(mask, dtype, result, vectors, reverse, shape, source, where, target, seed):
    assume(dtype != "tfloat32")
    x = sample(seed, shape, dtype, place=source)
    other = column(seed + 1, shape[0], vectors)
    chosen = np.repeat(np.random.default_rng(seed).integers(0, 2, (*shape[:-1], 1)), shape[-1], -1)
    chosen = chosen if where.view == "broadcast" else np.random.default_rng(seed).integers(0, 2, shape)

    def body(a, m, *loaded):
        (on_false,) = operands([other], loaded)
        dst, half, top = (empty(shape, result, target), empty(shape, "float32"), empty((shape[0], 1), "float32"))
        predicate, data = load(m, mask, where), load(a, dtype, source)
        nisa.select_reduce(dst, predicate, data, on_false, None, command.reset_reduce, reverse_pred=reverse)
        nisa.select_reduce(half, predicate, data, on_false, top, command.reduce, reverse_pred=not reverse)
        return [dst, top]

    got, top = run(body, host(x, dtype), host(chosen, mask), *columns([other]))
    expected, first = vector.select_reduce(chosen, x, other, reverse, "reset_reduce")
    same(got, expected, result)
    same(top, vector.select_reduce(chosen, x, other, not reverse, "reduce", first)[1], "float32")


COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


@given(
    st.sampled_from(COMPARISONS), st.sampled_from(COMPARISONS), any_float, any_float, st.integers(-20, 20), shapes,
    read_on_chip, on_chip, seeds,
)  # fmt: skip
@cases
def test_range_select(low, high, dtype, result, start, shape, source, target, seed):
    x = sample(seed, shape, dtype, place=source)
    bounds = [np.random.default_rng(seed + i).integers(-20, 40, (shape[0], 1)).astype(float) for i in (1, 2)]

    def body(a, *loaded):
        bound0, bound1 = operands(bounds, loaded)
        dst, second, top = empty(shape, result, target), empty(shape, "float32"), empty((shape[0], 1), "float32")
        data = load(a, dtype, source)
        nisa.range_select(dst, data, op(low), op(high), bound0, bound1, range_start=start)
        nisa.range_select(
            second, data, op(high), op(low), bound0, bound1, command.reduce, top, nl.max, start + 3, vector.FP32_MIN
        )
        return [dst, top]

    got, top = run(body, host(x, dtype), *columns(bounds))
    expected, first = vector.range_select(x, low, high, *bounds, start)
    same(got, expected, result)
    same(top, vector.range_select(x, high, low, *bounds, start + 3, "reduce", first)[1], "float32")


# Arithmetic.


@given(st.sampled_from(BINARY), any_dtype, any_dtype, any_dtype, shapes, read_on_chip, read_in_sbuf, on_chip, seeds)
@cases
def test_tensor_tensor(name, left, right, result, shape, first, second, target, seed):
    x, y = sample(seed, shape, left, place=first), sample(seed + 1, shape, right, place=second)

    def body(a, b):
        dst = empty(shape, result, target)
        nisa.tensor_tensor(dst, load(a, left, first), load(b, right, second), op(name), nisa.engine.vector)
        return [dst]

    close(run(body, host(x, left), host(y, right))[0], vector.tensor_tensor(x, y, name), result)


BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")


@given(st.sampled_from(BITWISE), any_integer, shapes, read_on_chip, read_in_sbuf, on_chip, seeds)
@cases
def test_tensor_tensor_on_bits(name, dtype, shape, first, second, target, seed):
    x, y = sample_bits(seed, shape, dtype, first), sample_bits(seed + 1, shape, dtype, second)
    y = y % 40 if "shift" in name else y

    def body(a, b):
        dst = empty(shape, dtype, target)
        nisa.tensor_tensor(dst, load(a, dtype, first), load(b, dtype, second), op(name))
        return [dst]

    same(run(body, host(x, dtype), host(y, dtype))[0], operators.bitwise(name, x, y, dtype), dtype)


@given(
    st.sampled_from((*BINARY, *UNARY)), st.sampled_from((*SMOOTH, "abs", "relu", None)), st.booleans(), st.booleans(),
    st.booleans(), any_dtype, any_dtype, shapes, read_on_chip, on_chip, seeds,
)  # fmt: skip
@cases
def test_tensor_scalar(op0, op1, vectors, reverse0, reverse1, dtype, result, shape, source, target, seed):
    x = sample(seed, shape, dtype, 1.0, 4.0, source)
    values = [None if name in UNARY or name is None else column(seed + i, shape[0], vectors) for i, name in
              ((1, op0), (2, op1))]  # fmt: skip

    def body(a, *loaded):
        operand0, operand1 = operands(values, loaded)
        dst = empty(shape, result, target)
        nisa.tensor_scalar(
            dst, load(a, dtype, source), op(op0), operand0, reverse0 and op0 not in UNARY, op1 and op(op1), operand1,
            reverse1 and op1 not in UNARY,
        )  # fmt: skip
        return [dst]

    expected = vector.tensor_scalar(x, op0, values[0], reverse0, op1, values[1], reverse1)
    close(run(body, host(x, dtype), *columns(values))[0], expected, result, magnitude=64)


@given(
    st.sampled_from((*BITWISE, "invert")), st.sampled_from(("bitwise_and", "bitwise_xor", None)), st.booleans(),
    st.booleans(), any_integer, shapes, read_on_chip, on_chip, seeds,
)  # fmt: skip
@cases
def test_tensor_scalar_on_bits(op0, op1, vectors, reverse, dtype, shape, source, target, seed):
    x = sample_bits(seed, shape, dtype, source)
    reverse = reverse and op0 != "invert"
    if reverse and "shift" in op0:
        x = x % 40
    values = sample_bits(seed + 1, (shape[0], 1), dtype)
    values = values % 40 if "shift" in op0 and not reverse else values
    number = int(values[0, 0])
    given0 = values if vectors else number

    def body(a, b):
        operand0 = None if op0 == "invert" else load(b, dtype) if vectors else number
        dst = empty(shape, dtype, target)
        second = {} if op1 is None else {"op1": op(op1), "operand1": 85, "reverse1": reverse}
        nisa.tensor_scalar(dst, load(a, dtype, source), op(op0), operand0, reverse, **second)
        return [dst]

    expected = vector.tensor_scalar_bitwise(x, dtype, op0, given0, reverse, op1, 85, reverse)
    same(run(body, host(x, dtype), host(values, dtype))[0], expected, dtype)


@given(
    st.sampled_from((*BINARY, *UNARY)), st.sampled_from(SMOOTH), st.booleans(), st.booleans(), st.booleans(), any_dtype,
    any_dtype, any_dtype, shapes, read_on_chip, read_in_sbuf, on_chip, seeds,
)  # fmt: skip
@cases
def test_scalar_tensor_tensor(
    op0, op1, vectors, reverse0, reverse1, left, right, result, shape, first, second, target, seed
):
    x, y = sample(seed, shape, left, 1.0, 4.0, first), sample(seed + 1, shape, right, place=second)
    value = None if op0 in UNARY else column(seed + 2, shape[0], vectors)

    def body(a, b, *loaded):
        (operand0,) = operands([value], loaded)
        dst = empty(shape, result, target)
        nisa.scalar_tensor_tensor(
            dst, load(a, left, first), op(op0), operand0, op(op1), load(b, right, second), reverse0, reverse1
        )
        return [dst]

    got = run(body, host(x, left), host(y, right), *columns([value]))[0]
    close(got, vector.scalar_tensor_tensor(x, op0, value, op1, y, reverse0, reverse1), result, magnitude=64)


@given(any_dtype, any_dtype, shapes, read_on_chip, on_chip, seeds)
@cases
def test_reciprocal(dtype, result, shape, source, target, seed):
    x = sample(seed, shape, dtype, -4.0, 4.0, source)

    def body(a):
        dst = empty(shape, result, target)
        nisa.reciprocal(dst, load(a, dtype, source))
        return [dst]

    close(run(body, host(x, dtype))[0], vector.reciprocal(x), result)


# Reductions.


@given(
    st.sampled_from(operators.REDUCTIONS), st.integers(1, 2), st.booleans(), st.booleans(), any_dtype, any_dtype,
    st.tuples(partition_counts, st.integers(1, 6), st.integers(1, 7)), read_on_chip, on_chip, seeds,
)  # fmt: skip
@cases
def test_tensor_reduce(name, axes, negate, keepdims, dtype, result, shape, source, target, seed):
    assume(dtype in FLOATS or name != "multiply")
    x = sample(seed, shape, dtype, 0.5 if name == "multiply" else -4.0, 1.5 if name == "multiply" else 4.0, source)
    axis = tuple(range(3 - axes, 3))

    def body(a):
        kept = shape[: 3 - axes]
        dst = empty((*kept, *(1 for _ in axis)) if keepdims or axes == 2 else kept, result, target)
        nisa.tensor_reduce(dst, op(name), load(a, dtype, source), axis, negate, keepdims)
        return [dst]

    expected = vector.tensor_reduce(name, x, axis, negate, keepdims)
    got = run(body, host(x, dtype))[0].reshape(expected.shape)
    close(got, expected, result, steps=42, magnitude=np.abs(x).sum(axis, keepdims=keepdims) + np.abs(expected))


@given(st.sampled_from(operators.BITWISE_REDUCTIONS), any_integer, shapes, read_on_chip, on_chip, seeds)
@cases
def test_tensor_reduce_on_bits(name, dtype, shape, source, target, seed):
    x = sample_bits(seed, shape, dtype, source)
    axis = tuple(range(1, len(shape)))

    def body(a):
        dst = empty((shape[0], 1), dtype, target)
        nisa.tensor_reduce(dst, op(name), load(a, dtype, source), axis)
        return [dst]

    got = run(body, host(x, dtype))[0]
    same(got, operators.wrap_integer(vector.tensor_reduce_bitwise(name, x, axis), dtype), dtype)


@given(
    st.sampled_from((*SMOOTH, "abs", "square")), st.sampled_from(("add", "multiply", "maximum", "minimum")),
    st.sampled_from(("reset_reduce", "load_reduce")), st.booleans(), st.booleans(), any_dtype, any_float, shapes,
    read_on_chip, on_chip, seeds,
)  # fmt: skip
@cases
def test_tensor_scalar_reduce(op0, reducer, start, vectors, negate, dtype, result, shape, source, target, seed):
    product = reducer == "multiply"
    assume(not product or op0 in ("abs", "maximum"))
    x = sample(seed, shape, dtype, 0.5, 1.0, source)
    operand = None if op0 in ("abs", "square") else column(seed + 1, shape[0], vectors, 0.5, 1.0)
    initial = column(seed + 2, shape[0], vectors) if start == "load_reduce" else None

    def body(a, *loaded):
        operand0, reduce_init = operands([operand, initial], loaded)
        dst, total = empty(shape, result, target), empty((shape[0], 1), "float32", target)
        data = load(a, dtype, source)
        nisa.tensor_scalar_reduce(
            dst, data, op(op0), operand0, op(reducer), reduce_cmd=command[start], reduce_init=reduce_init
        )
        nisa.tensor_scalar_reduce(
            dst, data, op(op0), operand0, op(reducer), total, False, command.reduce, reduce_res_negate=negate
        )
        return [dst, total]

    got, total = run(body, host(x, dtype), *columns([operand, initial]))
    expected, first = vector.tensor_scalar_reduce(x, op0, operand, reducer, start, initial)
    close(got, expected, result)
    _, second = vector.tensor_scalar_reduce(x, op0, operand, reducer, "reduce", None, first)
    bound = np.abs(expected).reshape(shape[0], -1).sum(1, keepdims=True) * 2 + np.abs(second) + 4
    close(total, -second if negate else second, "float32", steps=2 * expected[0].size + 2, magnitude=bound)


NARROW = ("bfloat16", "float16", "float32", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "uint8",
          "uint16")  # fmt: skip


@given(
    st.sampled_from((*SMOOTH, "abs")), st.sampled_from(SMOOTH), st.sampled_from(("reset_reduce", "load_reduce")),
    st.booleans(), st.sampled_from(NARROW), st.sampled_from(NARROW), shapes, read_on_chip, on_chip, seeds,
)  # fmt: skip
@cases
def test_tensor_scalar_cumulative(op0, op1, start, vectors, dtype, result, shape, source, target, seed):
    x = sample(seed, shape, dtype, 0.5, 1.0, source)
    assume(op1 != "multiply" or op0 in ("maximum", "minimum"))
    operand = None if op0 == "abs" else column(seed + 1, shape[0], vectors, 0.5, 1.0)
    initial = column(seed + 2, shape[0], vectors) if start == "load_reduce" else None

    def body(a, *loaded):
        imm0, imm1 = operands([operand, initial], loaded)
        first, second = empty(shape, result, target), empty(shape, result, target)
        data = load(a, dtype, source)
        nisa.tensor_scalar_cumulative(first, data, op(op0), op(op1), imm0, imm1, command[start])
        nisa.tensor_scalar_cumulative(second, data, op(op0), op(op1), imm0, reduce_cmd=command.reduce)
        return [first, second]

    got = run(body, host(x, dtype), *columns([operand, initial]))
    first, registers = vector.tensor_scalar_cumulative(x, op0, op1, operand, initial, start)
    second, _ = vector.tensor_scalar_cumulative(x, op0, op1, operand, None, "reduce", registers)
    for ours, exact in zip(got, (first, second), strict=True):
        close(ours, exact, result, steps=2 * first[0].size + 2, magnitude=4 * first[0].size + 4)


@given(
    st.sampled_from(BINARY), st.sampled_from(SMOOTH), st.booleans(), st.booleans(), st.booleans(), any_float, any_float,
    any_float, shapes, read_on_chip, read_in_sbuf, on_chip, seeds,
)  # fmt: skip
@cases
def test_tensor_tensor_scan(
    op0, op1, reverse0, reverse1, vectors, left, right, result, shape, first, second, target, seed
):
    # Operators that jump are applied to whole numbers only, which float32 holds without rounding.
    whole = op0 not in SMOOTH
    x, y = sample(seed, shape, left, -1.0, 1.0, first), sample(seed + 1, shape, right, -1.0, 1.0, second)
    assume(not whole or op1 in ("add", "subtract", "maximum", "minimum"))
    x, y = (np.rint(x), np.rint(y)) if whole else (x, y)
    initial = column(seed + 2, shape[0], vectors)
    initial = initial if not whole else np.rint(initial) if vectors else float(round(initial))

    def body(a, b, *loaded):
        (start,) = operands([initial], loaded)
        dst = empty(shape, result, target)
        nisa.tensor_tensor_scan(
            dst, load(a, left, first), load(b, right, second), start, op(op0), op(op1), reverse0, reverse1
        )
        return [dst]

    got = run(body, host(x, left), host(y, right), *columns([initial]))[0]
    expected = vector.tensor_tensor_scan(x, y, initial, op0, op1, reverse0, reverse1)
    close(got, expected, result, steps=2 * expected[0].size, magnitude=expected[0].size + 4)


EXPONENTIAL_IN = ("bfloat16", "float16", "float32", "float8_e4m3", "float8_e5m2", "int8", "int16", "int32", "uint8",
                  "uint16", "uint32")  # fmt: skip


@given(
    st.sampled_from(("idle", "reset_reduce", "load_reduce")), st.booleans(), st.sampled_from(EXPONENTIAL_IN),
    st.sampled_from(("bfloat16", "float32", "tfloat32", "float8_e5m2", "int16")), shapes, read_on_chip, on_chip, seeds,
)  # fmt: skip
@cases
def test_exponential(start, vectors, dtype, result, shape, source, target, seed):
    x = sample(seed, shape, dtype, place=source)
    top, initial = column(seed + 1, shape[0], vectors), column(seed + 2, shape[0], vectors)
    given_values = [top, initial if start == "load_reduce" else 0.0]

    def body(a, *loaded):
        max_value, reduce_init = operands(given_values, loaded)
        dst, total = empty(shape, result, target), empty((shape[0], 1), "float32", target)
        data = load(a, dtype, source)
        nisa.exponential(dst, data, max_value, None, command[start], reduce_init)
        if start == "idle":
            return [dst]
        nisa.exponential(dst, data, max_value, total, command.reduce)
        return [dst, total]

    got = run(body, host(x, dtype), *columns(given_values))
    expected, first = vector.exponential(x, top, start, initial)
    # The difference is rounded before the function, which makes its relative error as large as the difference.
    close(got[0], expected, result, steps=12)
    if start != "idle":
        _, total = vector.exponential(x, top, "reduce", registers=first)
        bound = np.abs(total) + np.abs(first) + 4
        close(got[1], total, "float32", steps=2 * expected[0].size + 12, magnitude=bound)


@given(st.integers(1, 512), st.integers(1, 3), partition_counts, any_float, in_sbuf, on_chip, seeds)
@cases
def test_batch_normalisation_statistics(elements, tiles, partitions, dtype, source, target, seed):
    x = sample(seed, (tiles, partitions, elements), dtype)

    def body(a):
        stats = empty((partitions, 6 * tiles), "float32", target)
        for i in range(tiles):
            nisa.bn_stats(stats[:, 6 * i : 6 * i + 6], load(a[i], dtype, source))
        result = empty((partitions, 2), "float32", source)
        nisa.bn_aggr(result, stats)
        return [stats, result]

    stats, result = run(body, host(x, dtype))
    expected = np.concatenate([vector.bn_stats(tile) for tile in x], 1)
    close(stats, expected, "float32", steps=8, magnitude=16 * elements)
    close(result, vector.bn_aggr(expected), "float32", steps=64, magnitude=16)


# Search.


@given(
    any_dtype, st.sampled_from(("uint16", "uint32")), partition_counts, st.integers(8, 60), read_on_chip, in_sbuf,
    st.booleans(), seeds,
)  # fmt: skip
@cases
def test_max8_find_and_replace(dtype, index, partitions, elements, source, target, dense, seed):
    x = sample(seed, (partitions, elements), dtype, place=source)
    x = np.rint(x) if dense else x  # many equal elements, or few

    def body(a):
        data = load(a, dtype, source)
        top, places = empty((partitions, 8), dtype, target), empty((partitions, 8), index, target)
        replaced, matched = empty((partitions, elements), dtype, target), empty((partitions, 8), index)
        nisa.max8(top, data)
        nisa.nc_find_index8(places, data, top)
        nisa.nc_match_replace8(replaced, data, top, 1.0, matched)
        return [top, places, replaced, matched]

    top, places, replaced, matched = run(body, host(x, dtype))
    expected = vector.max8(x)
    same(top, expected, dtype)
    same(places, operators.wrap_integer(vector.nc_find_index8(x, expected), index), index)
    result, found = vector.nc_match_replace8(x, expected, 1.0)
    same(replaced, result, dtype)
    same(matched, operators.wrap_integer(found, index), index)


@given(st.sampled_from(("uint16", "uint32")), seeds)
@cases
def test_values_that_are_not_found_have_all_ones_for_a_position(index, seed):
    x = sample(seed, (8, 20))
    wanted = np.where(np.random.default_rng(seed).integers(0, 2, (8, 8)), x[:, 3:11], 99.0)

    def body(a, b):
        data, values = load(a, "float32"), load(b, "float32")
        places, matched = empty((8, 8), index), empty((8, 8), index)
        replaced = empty((8, 20), "float32")
        nisa.nc_find_index8(places, data, values)
        nisa.nc_match_replace8(replaced, data, values, -1.0, matched)
        return [places, replaced, matched]

    places, replaced, matched = run(body, host(x, "float32"), host(wanted, "float32"))
    same(places, operators.wrap_integer(vector.nc_find_index8(x, wanted), index), index)
    result, found = vector.nc_match_replace8(x, wanted, -1.0)
    same(replaced, result, "float32")
    same(matched, operators.wrap_integer(found, index), index)


def test_the_documented_example_of_replaced_duplicates():
    def body(a, b):
        replaced, matched = empty((1, 11), "float32"), empty((1, 8), "uint32")
        nisa.nc_match_replace8(replaced, load(a, "float32"), load(b, "float32"), 0.0, matched)
        return [matched]

    data, values = [[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], [[3, 8, 8, 8, 8, 8, 8, 8]]
    got = run(body, host(data, "float32"), host(values, "float32"))[0]
    np.testing.assert_array_equal(got, [[2, 10, 9, 8, 7, 6, 5, 4]])


@given(
    any_dtype, st.sampled_from((32, 64, 96, 128)), st.integers(1, 9), st.booleans(), st.booleans(), on_chip, in_sbuf,
    seeds,
)  # fmt: skip
@cases
def test_nc_stream_shuffle(dtype, partitions, elements, keeps, in_place, source, target, seed):
    random = np.random.default_rng(seed)
    mask = [int(entry) for entry in random.integers(0, 32, 32)]
    mask = [255 if keeps and random.integers(0, 3) == 0 else entry for entry in mask]
    x, y = sample(seed, (partitions, elements), dtype), sample(seed + 1, (partitions, elements), dtype)

    def body(a, b):
        src = load(a, dtype, source)
        dst = src if in_place else load(b, dtype, target)
        nisa.nc_stream_shuffle(dst, src, mask)
        return [dst]

    got = run(body, host(x, dtype), host(y, dtype))[0]
    same(got, vector.nc_stream_shuffle(x if in_place else y, x, mask), dtype)
