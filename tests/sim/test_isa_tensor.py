"""Matmul and transpose on the Tensor Engine against their float64 evaluation, and PSUM as an accumulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nki_parallel_attn.sim import Checks, NkiValidationError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import dtypes, tensor
from .tiles import Place, any_dtype, cases, close, empty, host, in_sbuf, load, run, same, sample, sample_bits, seeds

NARROW = st.sampled_from(("bfloat16", "float16", "float8_e4m3", "float8_e5m2"))
WIDE = st.sampled_from(("float32", "tfloat32"))
PAIRS = st.one_of(st.tuples(NARROW, NARROW), st.tuples(WIDE, WIDE))
FLOAT8 = st.sampled_from(("float8_e4m3", "float8_e5m2"))
CONTRACTIONS = st.sampled_from((1, 7, 32, 64, 100, 128))
WIDTHS = st.sampled_from((1, 5, 32, 64, 128))
mode = nisa.matmul_perf_mode
psum_place = st.builds(Place, st.sampled_from(("whole", "strided")), st.just(True))


def psum(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype, nl.psum)


def integers(seed, shape):
    """Small integers, whose products and sums float32 holds exactly."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)


def rule_of(kernel, *arrays, target="trn3", **options):
    """The rule that the kernel breaks."""
    with pytest.raises(NkiValidationError) as caught:
        simulate(kernel, target=target, **options)(*arrays)
    return caught.value.rule


@given(PAIRS, CONTRACTIONS, WIDTHS, st.integers(1, 40), in_sbuf, in_sbuf, psum_place, seeds)
@cases
def test_nc_matmul(pair, k, m, n, left, right, place, seed):
    x, y = sample(seed, (k, m), pair[0]), sample(seed + 1, (k, n), pair[1])

    def body(a, b):
        dst = empty((m, n), "float32", place)
        nisa.nc_matmul(dst, load(a, pair[0], left), load(b, pair[1], right))
        return [dst]

    magnitude = tensor.nc_matmul(abs(x), abs(y))
    close(run(body, host(x, "f"), host(y, "f"))[0], tensor.nc_matmul(x, y), "float32", steps=k, magnitude=magnitude)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), seeds)
@cases
def test_free_dims_are_flattened_and_accumulated(m0, m1, n0, seed):
    x, y = integers(seed, (3, 16, m0, m1)), integers(seed + 1, (3, 16, n0, 2))

    def body(a, b):
        dst = psum(m0 * m1, n0, 2)
        for i in range(3):
            nisa.nc_matmul(dst, load(a[i], "float16"), load(b[i], "float16"), accumulate=i > 0)
        return [dst]

    expected = sum(tensor.nc_matmul(x[i], y[i]) for i in range(3))
    same(run(body, host(x, "f"), host(y, "f"))[0], expected, "float32")


@given(FLOAT8, FLOAT8, CONTRACTIONS, WIDTHS, st.integers(1, 40), seeds)
@cases
def test_double_row(left, right, k, m, n, seed):
    x, y = sample(seed, (k, 2, m), left), sample(seed + 1, (k, 2, n), right)

    def body(a, b):
        dst = psum(m, n)
        nisa.nc_matmul(dst, load(a, left), load(b, right), perf_mode=mode.double_row)
        return [dst]

    magnitude = tensor.nc_matmul_double_row(abs(x), abs(y))
    got = run(body, host(x, "f"), host(y, "f"), target="trn2")[0]
    close(got, tensor.nc_matmul_double_row(x, y), "float32", steps=2 * k, magnitude=magnitude)


@given(st.integers(1, 6), seeds)
@cases
def test_bfloat16_psum_rounds_at_each_accumulation(count, seed):
    # Products of 8-bit integers are exact in float32, so only the roundings to bfloat16 differ from float64.
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-127, 128, (count, 3, n)).astype(np.float64) for n in (8, 8))

    def body(a, b):
        dst = psum(8, 8, dtype=nl.bfloat16)
        for i in range(count):
            nisa.nc_matmul(dst, load(a[i], "bfloat16"), load(b[i], "bfloat16"))
        return [dst]

    expected = tensor.accumulate_bfloat16([tensor.nc_matmul(x[i], y[i]) for i in range(count)])
    np.testing.assert_array_equal(run(body, host(x, "f"), host(y, "f"))[0], expected)


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 16), st.sampled_from((None, False))), min_size=1, max_size=8),
    st.booleans(),
    seeds,
)
@cases
def test_accumulate_none_adds_where_something_was_written(writes, checks, seed):
    writes = [(start, min(width, 16 - start), accumulate) for start, width, accumulate in writes]
    x, ys = integers(seed, (4, 3)), [integers(seed + i, (4, width)) for i, (_, width, _) in enumerate(writes)]
    expected, written = np.zeros((3, 16)), np.zeros(16, bool)
    for y, (start, width, accumulate) in zip(ys, writes, strict=True):
        columns = slice(start, start + width)
        old = expected[:, columns] * written[columns] if accumulate is None else 0
        expected[:, columns] = old + tensor.nc_matmul(x, y)
        written[columns] = True

    def kernel(a, *bs):
        dst, tile = psum(3, 16), load(a, "float32")
        for b, (start, width, accumulate) in zip(bs, writes, strict=True):
            nisa.nc_matmul(dst[:, start : start + width], tile, load(b, "float32"), accumulate=accumulate)
        outs = []
        for column in np.flatnonzero(written):
            sbuf, out = nl.ndarray((3, 1), nl.float32), nl.ndarray((3, 1), nl.float32, nl.shared_hbm)
            nisa.tensor_copy(sbuf, dst[:, column : column + 1])
            nl.store(out, sbuf)
            outs.append(out)
        return tuple(outs)

    got = simulate(kernel, target="trn2", checks=checks)(host(x, "f"), *(host(y, "f") for y in ys))
    np.testing.assert_array_equal(np.concatenate(got, 1), expected[:, written])


@pytest.mark.parametrize("checks", [True, False])
def test_a_fresh_value_is_accumulated_onto_from_trn3(checks):
    def kernel(a):
        dst, sbuf = psum(4, 4), nl.ndarray((4, 4), nl.float32)
        nisa.memset(dst, 3.0)
        nisa.nc_matmul(dst, load(a, "float32"), load(a, "float32"))
        nisa.tensor_copy(sbuf, dst)
        out = nl.ndarray((4, 4), nl.float32, nl.shared_hbm)
        nl.store(out, sbuf)
        return out

    x = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(simulate(kernel, target="trn3", checks=checks)(x), x + 3)


def test_before_trn3_only_what_a_matmul_wrote_is_accumulated_onto():
    x = np.eye(4, dtype=np.float32)

    def zeros_beside_a_product(a):
        tile, dst = load(a, "float32"), nl.zeros((4, 8), nl.float32, nl.psum)
        nisa.nc_matmul(dst[:, 0:4], tile, tile)
        nisa.nc_matmul(dst[:, 2:6], tile, tile)

    simulate(zeros_beside_a_product, target="trn2", checks=Checks(outputs=False))(x)

    def copied_over_a_product(a):
        tile, dst = load(a, "float32"), psum(4, 4)
        nisa.nc_matmul(dst, tile, tile)
        nisa.tensor_copy(dst[:, 1:2], tile[:, 1:2])
        nisa.nc_matmul(dst, tile, tile, accumulate=True)

    assert rule_of(copied_over_a_product, x, target="trn2") == "psum-accumulate"

    def one_bank_under_two_names(a):
        tile = load(a, "float32")
        first, second = (nl.ndarray((4, 4), nl.float32, nl.psum, address=(0, 0)) for _ in range(2))
        nisa.nc_matmul(first, tile, tile)
        nisa.nc_matmul(second, tile, tile, accumulate=True)
        return second

    got = run(lambda a: [one_bank_under_two_names(a)], x, target="trn2")[0]
    np.testing.assert_array_equal(got, 2 * x)


@given(st.sampled_from(((0, 0), (32, 0), (96, 64), (64, 32))), seeds)
@cases
def test_tiles_of_the_array_and_hints_change_no_result(position, seed):
    x, y = integers(seed, (32, 32)), integers(seed + 1, (32, 9))

    def body(a, b):
        dst = psum(32, 9)
        options = {"is_stationary_onezero": True, "is_moving_onezero": True}
        nisa.nc_matmul(
            dst, load(a, "float32"), load(b, "float32"), tile_position=position, tile_size=(32, 32), **options
        )
        return [dst]

    same(run(body, host(x, "f"), host(y, "f"), target="trn2")[0], tensor.nc_matmul(x, y), "float32")


@given(st.sampled_from(("float32", "bfloat16", "float16")), CONTRACTIONS, WIDTHS, seeds)
@cases
def test_transpose_mode_is_bit_exact(dtype, k, m, seed):
    x = sample(seed, (k, m), dtype)
    x[0, 0] = np.nan
    x[-1, -1] = np.inf

    def body(a):
        dst = psum(m, k, dtype=getattr(nl, dtype))
        identity = nl.shared_identity_matrix(k, getattr(nl, dtype))
        nisa.nc_matmul(dst, load(a, dtype), identity, is_transpose=True)
        return [dst]

    same(run(body, host(x, "f"), target="trn2")[0], tensor.nc_transpose(x), dtype)


@given(any_dtype, st.sampled_from(((1, 1), (32, 17), (5, 32), (128, 60), (64, 128))), in_sbuf, seeds)
@cases
def test_nc_transpose(dtype, shape, place, seed):
    x = sample_bits(seed, shape, dtype) if dtype in dtypes.INTEGERS else sample(seed, shape, dtype)

    def body(a):
        tile = load(a, dtype, place)
        tiles = [nl.ndarray(shape[::-1], tile.dtype, nl.psum)]
        nisa.nc_transpose(tiles[0], tile)
        if max(shape) <= 32:
            tiles.append(nl.ndarray(shape[::-1], tile.dtype))
            nisa.nc_transpose(tiles[1], tiles[0].permute((0, 1)) if shape[0] == shape[1] else tile)
        return tiles[:1] if shape[0] == shape[1] else tiles

    for got in run(body, host(x, dtype)):
        same(got, tensor.nc_transpose(x), dtype)


def test_on_trn1_a_nan_spreads_in_a_tensor_engine_transpose():
    x = np.zeros((3, 2), np.float32)
    x[1, 0] = np.nan

    def body(a):
        dst = psum(2, 3)
        nisa.nc_transpose(dst, load(a, "float32"), engine=nisa.engine.tensor)
        return [dst]

    np.testing.assert_array_equal(run(body, x, target="trn1")[0], [[np.nan] * 3, [0.0] * 3])


def snake(offsets, group=32):
    """The index of tensor indirection for offsets [groups, n]: offset i of a group at [i % group, i // group]."""
    groups, count = offsets.shape
    index = np.zeros((groups * group, -(-count // group)), np.int32)
    for g in range(groups):
        for i in range(count):
            index[g * group + i % group, i // group] = offsets[g, i]
    return index


@given(seeds)
@cases
def test_tensor_indirection_gathers_and_scatters_columns(seed):
    rng = np.random.default_rng(seed)
    x, y = integers(seed, (64, 50)), integers(seed + 1, (64, 80))
    left, right = rng.integers(0, 50, (2, 64)), rng.integers(0, 80, (2, 70))
    target = np.stack([rng.permutation(90)[:70] for _ in range(2)])
    gathered = [
        np.concatenate([values[32 * g : 32 * g + 32][:, columns[g]] for g in range(2)])
        for values, columns in ((x, left), (y, right))
    ]
    product = tensor.nc_matmul(*gathered)
    expected = np.zeros((64, 90))
    for row in range(64):
        expected[row, target[row // 32]] = product[row]

    def body(a, b, i, j, k):
        dst = psum(64, 90)
        nisa.memset(dst, 0.0)
        places = [load(index, "int32") for index in (i, j, k)]
        for accumulate in (False, True):
            nisa.nc_matmul(
                dst.indirect(places[2], 70),
                load(a, "bfloat16").indirect(places[0], 64),
                load(b, "float16").indirect(places[1], 70),
                accumulate=accumulate,
            )
        return [dst]

    got = run(body, host(x, "f"), host(y, "f"), snake(left), snake(right), snake(target))[0]
    same(got, 2 * expected, "float32")


def broken_options(**options):
    def kernel(a):
        tile = load(a, "bfloat16")
        nisa.nc_matmul(psum(128, 128), tile, tile, **options)

    return kernel


@pytest.mark.parametrize(
    ("kernel", "rule", "target"),
    [
        (broken_options(perf_mode="double_row"), "enum-argument", "trn2"),
        (broken_options(tile_position=(0, 0)), "tile-position", "trn2"),
        (broken_options(tile_position=(0, 0), tile_size=(128, 96)), "tile-position", "trn2"),
        (broken_options(tile_position=(0, 128), tile_size=(128, 128)), "tile-position", "trn2"),
        (broken_options(tile_position=(0, 0), tile_size=(32, 128)), "target", "trn1"),
        (broken_options(tile_position=(64, 0), tile_size=(64, 128)), "tile-position", "trn2"),
    ],
)
def test_options_are_refused(kernel, rule, target):
    assert rule_of(kernel, np.ones((128, 128), np.float32), target=target) == rule


def test_moving_limit_of_trn3_is_the_whole_psum():
    def kernel(width, dtype):
        def wide(a):
            moving, dst = nl.zeros((8, width), nl.bfloat16), nl.ndarray((8, width), dtype, nl.psum)
            nisa.nc_matmul(dst, load(a, "bfloat16"), moving)

        return wide

    x = np.ones((8, 8), np.float32)
    quiet = Checks(capacity=False, outputs=False)
    for width, dtype in ((4096, nl.float32), (8192, nl.bfloat16)):
        simulate(kernel(width, dtype), target="trn3", checks=quiet)(x)
        assert rule_of(kernel(width + 1, dtype), x, checks=quiet) == "moving-limit"


def test_transposed_psum_keeps_the_operands_dtype_only_in_transpose_mode():
    def kernel(is_transpose):
        def transpose(a):
            identity = nl.shared_identity_matrix(8, nl.float16)
            nisa.nc_matmul(psum(8, 8, dtype=nl.float16), load(a, "float16"), identity, is_transpose=is_transpose)

        return transpose

    x = np.ones((8, 8), np.float32)
    simulate(kernel(True), target="trn2")(x)
    assert rule_of(kernel(False), x, target="trn2") == "operand-dtype"
    assert rule_of(kernel(True), x, target="trn1") == "operand-dtype"


def test_float8_e4m3fn_needs_trn3():
    def kernel(a):
        tile = load(a, "float8_e4m3fn")
        nisa.nc_matmul(psum(8, 8), tile, tile)

    x = np.ones((8, 8), np.float32)
    simulate(kernel, target="trn3")(x)
    assert rule_of(kernel, x, target="trn2") == "target"


def test_tensor_indirection_has_its_limits():
    x, index = np.ones((32, 8), np.float32), np.zeros((32, 1), np.int32)

    def kernel(dtype, address=None, **options):
        def gather(a, i):
            tile = nl.ndarray((32, 8), getattr(nl, dtype), address=address and (0, 0))
            nisa.dma_copy(tile, a)
            places = nl.ndarray((32, 1), nl.int32, address=address)
            nisa.dma_copy(places, i)
            nisa.nc_matmul(psum(8, 8), tile, tile.indirect(places, 8), **options)

        return gather

    simulate(kernel("bfloat16"), target="trn3")(x, index)
    assert rule_of(kernel("bfloat16"), x, index, target="trn2") == "target"
    assert rule_of(kernel("float32"), x, index) == "operand-dtype"
    assert rule_of(kernel("bfloat16", is_transpose=True), x, index) == "indirect-view"
    assert rule_of(kernel("bfloat16", address=(32, 0)), x, index) == "tensor-indirection-partition"
    tiled = kernel("bfloat16", tile_position=(32, 0), tile_size=(32, 128))
    assert rule_of(tiled, x, index) == "tile-position"


def test_the_cost_only_mode_checks_without_data():
    def kernel(a):
        dst = nl.zeros((128, 128), nl.float32, nl.psum)
        tile = load(a, "bfloat16")
        nisa.nc_matmul(dst, tile, tile)
        nisa.nc_matmul(dst, tile, tile, accumulate=True)

    simulate(kernel, target="trn3", compute=False)(np.ones((128, 128), np.float32))
