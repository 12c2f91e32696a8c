"""DMA and registers against their float64 evaluation: casts, views, run-time addresses, transposes, sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nki_parallel_attn.sim import NkiValidationError, OutOfBoundsError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import dma, dtypes
from .tiles import any_dtype, cases, close, empty, host, in_sbuf, load, run, same, sample, sample_bits, seeds, shapes

mode, oob, engine = nisa.dge_mode, nisa.oob_mode, nisa.engine
ROWS = st.sampled_from((1, 3, 32, 128))
X = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)


def values_of(seed, shape, dtype):
    """Values over the dtype's range, as kernel arguments hold them."""
    return sample_bits(seed, shape, dtype) if dtype in dtypes.INTEGERS else sample(seed, shape, dtype, -500, 500)


def out(tensor, shape=None, dtype=None):
    """A shared HBM tensor like `tensor`."""
    return nl.ndarray(shape or tensor.shape, dtype or tensor.dtype, nl.shared_hbm)


def rule_of(kernel, *arrays, target="trn3"):
    with pytest.raises(NkiValidationError) as caught:
        simulate(kernel, target=target)(*arrays)
    return caught.value.rule


# dma_copy.


@given(any_dtype, any_dtype, shapes, in_sbuf, in_sbuf, seeds)
@cases
def test_dma_copy_casts_through_float32(source, destination, shape, from_place, to_place, seed):
    x = values_of(seed, shape, source)

    def body(a):
        tile = empty(shape, source, from_place)
        nisa.dma_copy(tile, a)
        dst = empty(shape, destination, to_place)
        nisa.dma_copy(dst, tile)
        return [dst]

    same(run(body, host(x, source))[0], dma.dma_copy(x, source, shape, destination), destination)


@given(st.permutations(range(4)), st.integers(1, 3), seeds)
@cases
def test_dma_copy_between_views_of_other_shapes_is_row_major(order, step, seed):
    x = sample(seed, (4, 6, 2, 5))

    def kernel(a):
        src = a.permute(order)[::step]
        dst = out(a, (src.size,))
        nisa.dma_copy(dst, src)
        return dst

    expected = x.transpose(order)[::step].reshape(-1)
    np.testing.assert_array_equal(simulate(kernel)(host(x, "f")), expected)


patterns = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), min_size=1, max_size=4)


@given(patterns, st.integers(0, 5), st.integers(0, 5), st.booleans(), seeds)
@cases
def test_scalar_offsets_move_an_access_pattern(pattern, offset, index, register, seed):
    x = sample(seed, (24, 9))
    pattern = [list(pair) for pair in pattern]

    def kernel(a, i):
        if register:
            place = nisa.register_alloc()
            nisa.register_load(place, i)
        else:
            place = load(i, "int32")
        src = a.ap(pattern=pattern, offset=offset, scalar_offset=place, indirect_dim=0)
        dst = out(a, src.shape)
        nisa.dma_copy(dst, src)
        return dst

    flat = dma.access_pattern(x.shape, pattern, offset, scalar_offset=index)
    got = simulate(kernel)(host(x, "f"), np.array([[index]], np.int32))
    np.testing.assert_array_equal(got, x.reshape(-1)[flat])


def row_index(seed, rows, count, outside):
    """Row numbers, some of them outside 0..count-1 when asked for."""
    rng = np.random.default_rng(seed)
    index = rng.permutation(max(rows, count))[:rows] % count
    wrong = rng.random(rows) < 0.3 if outside else np.zeros(rows, bool)
    return np.where(wrong, rng.choice([count, -1, 2**31 - 1], rows), index).astype(np.int32)[:, None]


@given(ROWS, st.integers(1, 3), st.sampled_from(("float32", "bfloat16")), st.booleans(), st.booleans(), seeds)
@cases
def test_gather(rows, width, dtype, outside, select, seed):
    x, old = sample(seed, (50, width, 2), dtype), sample(seed + 1, (rows, 2 * width))
    index = row_index(seed, rows, 50, outside)

    def body(a, i, b):
        base = out(a, dtype=getattr(nl, dtype))
        nisa.dma_copy(base, a)
        dst, rows_tile = load(b, "float32"), load(i, "int32")
        pattern = [[2 * width, rows], [2, width], [1, 2]]
        src = base.vector_select(0, rows_tile) if select else base.ap(pattern, vector_offset=rows_tile)
        nisa.dma_copy(dst, src, oob_mode=oob.skip if outside else oob.error)
        return [dst]

    flat = dma.access_pattern(x.shape, [[0, rows], [2, width], [1, 2]], vector_offset=index)
    expected, _ = dma.gather(x, flat, old)
    np.testing.assert_array_equal(run(body, host(x, "f"), index, host(old, "f"))[0], expected)


@given(ROWS, st.integers(1, 3), st.booleans(), seeds)
@cases
def test_scatter(rows, width, outside, seed):
    x, base = sample(seed, (rows, 2 * width)), sample(seed + 1, (140, width, 2))
    index = row_index(seed, rows, 140, outside)

    def kernel(a, i, b):
        dst = out(b)
        nisa.dma_copy(dst, b)
        target = dst.vector_select(0, load(i, "int32"))
        nisa.dma_copy(target, load(a, "float32"), oob_mode=oob.skip if outside else oob.error)
        return dst

    flat = dma.access_pattern(base.shape, [[0, rows], [2, width], [1, 2]], vector_offset=index)
    expected, _ = dma.scatter(base, flat, x)
    np.testing.assert_array_equal(simulate(kernel)(host(x, "f"), index, host(base, "f")), expected)


@given(seeds, st.booleans())
@cases
def test_rows_skipped_on_both_sides(seed, manual):
    x, old = sample(seed, (40, 6)), sample(seed + 1, (40, 6))
    source, target = row_index(seed, 32, 40, True), row_index(seed + 2, 32, 40, True)

    def kernel(a, b, i, j):
        dst = out(b)
        nisa.dma_copy(dst, b)
        rows = [nl.ndarray((32, 1), nl.int32, address=(0, 64 * n) if manual else None) for n in range(2)]
        nisa.dma_copy(rows[0], i)
        nisa.dma_copy(rows[1], j)
        nisa.dma_copy(dst.vector_select(0, rows[1]), a.vector_select(0, rows[0]), oob_mode=oob.skip)
        return dst

    expected = old.copy()
    for i, j in zip(source[:, 0], target[:, 0], strict=True):
        if 0 <= i < 40 and 0 <= j < 40:
            expected[j] = x[i]
    got = simulate(kernel)(host(x, "f"), host(old, "f"), source, target)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("address", [None, (0, 1024)])
def test_skipped_rows_stay_uninitialised(address):
    index = np.array([[3], [64]], np.int32)

    def kernel(read):
        def gather(a, i):
            dst = nl.ndarray((2, 8), nl.float32, address=address)
            nisa.dma_copy(dst, a.vector_select(0, load(i, "int32")), oob_mode=oob.skip)
            result = out(a, (len(read), 8))
            nisa.dma_copy(result, dst[read[0] : read[-1] + 1])
            return result

        return gather

    np.testing.assert_array_equal(simulate(kernel([0]))(X, index), X[3:4])
    assert rule_of(kernel([0, 1]), X, index) == "uninitialised-read"


def test_all_rows_skipped_leaves_everything():
    def body(a, i):
        dst = load(a[0:2], "float32")
        nisa.dma_copy(dst, a.vector_select(0, load(i, "int32")), oob_mode=oob.skip)
        nisa.dma_copy(dst, a.ap([[8, 2], [1, 8]], scalar_offset=load(i[0:1], "int32")), oob_mode=oob.skip)
        return [dst]

    np.testing.assert_array_equal(run(body, X, np.array([[64], [-1]], np.int32))[0], X[:2])


def gather_with(dtype="int32", columns=1, count=16, transpose=False, **options):
    """A gather of `count` rows of 8."""

    def kernel(a, i):
        rows = nl.ndarray((count // columns, columns), getattr(nl, dtype))
        nisa.memset(rows, 0)
        src = a.ap([[8, count], [1, 8]], vector_offset=rows)
        if transpose:
            nisa.dma_transpose(nl.ndarray((8, count), a.dtype), src, **options)
        else:
            nisa.dma_copy(nl.ndarray((count, 8), a.dtype), src, **options)

    return kernel


def copy_with(cast=None, **options):
    def kernel(a, i):
        nisa.dma_copy(nl.ndarray(a.shape, cast or a.dtype), a, **options)

    return kernel


@pytest.mark.parametrize(
    ("kernel", "rule", "target"),
    [
        (copy_with(dge_mode=mode.hwdge, engine=engine.scalar), None, "trn2"),
        (copy_with(dge_mode=mode.hwdge, engine=engine.sync), None, "trn2"),
        (copy_with(dge_mode=mode.hwdge), "target", "trn1"),
        (copy_with(dge_mode=mode.hwdge, engine=engine.gpsimd), "dma-mode", "trn2"),
        (copy_with(nl.bfloat16, dge_mode=mode.swdge), None, "trn1"),
        (copy_with(nl.bfloat16, dge_mode=mode.none), None, "trn1"),
        (copy_with(nl.float8_e8m0fnu), "dma-cast", "trn3"),
        (copy_with(priority=0), None, "trn3"),
        (copy_with(priority=-1), "dma-mode", "trn3"),
        (copy_with(priority=True), "integer", "trn3"),
        (copy_with(dge_mode=1), "enum-argument", "trn3"),
        (copy_with(oob_mode="skip"), "enum-argument", "trn3"),
        (gather_with(dge_mode=mode.swdge), None, "trn2"),
        (gather_with(), "target", "trn1"),
        (gather_with(dge_mode=mode.none), "dma-mode", "trn2"),
        (gather_with(columns=2), "view", "trn2"),
    ],
)
def test_modes_of_dma_copy(kernel, rule, target):
    index = np.zeros((16, 1), np.int32)
    if rule is None:
        simulate(kernel, target=target)(X, index)
    else:
        assert rule_of(kernel, X, index, target=target) == rule


def test_rows_outside_are_an_error_that_names_them():
    with pytest.raises(OutOfBoundsError, match=r"offset 64 at partition 1 .* 64 rows"):
        simulate(lambda a, i: nl.store(out(a, (2, 8)), a.vector_select(0, load(i, "int32"))))(
            X, np.array([[0], [64]], np.int32)
        )


# dma_transpose.

TRANSPOSED = st.one_of(
    st.tuples(st.integers(1, 20), st.integers(1, 128)),
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 20)),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20)),
)


@given(any_dtype, TRANSPOSED, st.booleans(), seeds)
@cases
def test_dma_transpose(dtype, shape, on_chip, seed):
    x = values_of(seed, shape, dtype)

    def body(a):
        tile = load(a, dtype) if on_chip else out(a, dtype=getattr(nl, dtype))
        if not on_chip:
            nisa.dma_copy(tile, a)
        dst = nl.ndarray(dma.dma_transpose(x).shape, tile.dtype)
        nisa.dma_transpose(dst, tile, axes=[None, (1, 0), (2, 1, 0), (3, 1, 2, 0)][len(shape) - 1])
        return [dst]

    same(run(body, host(x, dtype))[0], dma.dma_transpose(x), dtype)


@pytest.mark.parametrize(
    ("index_shape", "shape"),
    [((16, 1), (16, 128)), ((128, 1), (128, 20)), ((128, 3), (384, 64)), ((128, 2), (256, 1, 3, 8))],
)
@pytest.mark.parametrize("skip", [False, True])
def test_indirect_transpose_gathers_rows_in_column_major_order(index_shape, shape, skip):
    count, rest = shape[0], shape[1:]
    rng = np.random.default_rng(count)
    base = dtypes.round_to(rng.standard_normal((500, *rest)), "bfloat16")
    index = rng.permutation(500)[:count].reshape(index_shape).astype(np.uint32)
    if skip:
        index.reshape(-1)[::3] = 2**32 - 1
    order = index.T.reshape(-1)

    def body(a, i):
        half = out(a, dtype=nl.bfloat16)
        nisa.dma_copy(half, a)
        dst = nl.ndarray((rest[-1], *rest[:-1], count), nl.bfloat16)
        nisa.memset(dst, 7.0)
        strides = np.cumprod((1, *rest[::-1]))[::-1].tolist()
        src = half.ap([list(pair) for pair in zip(strides, shape, strict=True)], vector_offset=load(i, "uint32"))
        nisa.dma_transpose(dst, src, oob_mode=oob.skip if skip else oob.error, dge_mode=mode.swdge)
        return [dst]

    gathered = np.where((order < 500).reshape(-1, *[1] * len(rest)), base[np.minimum(order, 499)], 7.0)
    np.testing.assert_array_equal(run(body, host(base, "f"), index, target="trn2")[0], dma.dma_transpose(gathered))
    if not skip:
        whole = dma.dma_gather_transpose(base, index, count)
        np.testing.assert_array_equal(dma.dma_transpose(gathered), whole)


def transpose_with(shape, dtype=nl.bfloat16, **options):
    def kernel(a, i):
        src = nl.zeros(shape, dtype)
        buffer = nl.sbuf if shape[-1] <= 128 else nl.shared_hbm
        dst = nl.ndarray(dma.dma_transpose(np.empty(shape, bool)).shape, dtype, buffer)
        nisa.dma_transpose(dst, src, **options)

    return kernel


def gather_transpose(rows=(128, 128), index=(128, 1), dtype=nl.bfloat16, index_dtype=nl.uint32, **options):
    def kernel(a, i):
        base = nl.zeros((256, *rows[1:]), dtype, nl.hbm)
        places = nl.zeros(index, index_dtype)
        strides = np.cumprod((1, *rows[:0:-1]))[::-1].tolist()
        src = base.ap([list(pair) for pair in zip(strides, rows, strict=True)], vector_offset=places)
        dst = nl.ndarray(dma.dma_transpose(np.empty(rows, bool)).shape, dtype, nl.shared_hbm)
        nisa.dma_transpose(dst, src, **options)

    return kernel


@pytest.mark.parametrize(
    ("kernel", "rule", "target"),
    [
        (transpose_with((16, 128), dge_mode=mode.hwdge), None, "trn2"),
        (transpose_with((8, 2, 128), dge_mode=mode.hwdge), None, "trn2"),
        (transpose_with((1, 3, 16, 128), dge_mode=mode.hwdge), None, "trn2"),
        (transpose_with((16, 128), dge_mode=mode.hwdge), "target", "trn1"),
        (transpose_with((32, 128), dge_mode=mode.hwdge), "dma-transpose-hwdge", "trn2"),
        (transpose_with((16, 129), dge_mode=mode.hwdge), "dma-transpose-hwdge", "trn2"),
        (transpose_with((32, 1, 128), dge_mode=mode.hwdge), "dma-transpose-hwdge", "trn2"),
        (transpose_with((8, 1, 128), dge_mode=mode.hwdge), "dma-transpose-hwdge", "trn2"),
        (transpose_with((16, 8), nl.uint8, dge_mode=mode.hwdge), "dma-transpose-hwdge", "trn2"),
        (transpose_with((16, 128), dge_mode=mode.swdge), "dma-mode", "trn2"),
        (transpose_with((16, 128), oob_mode=oob.skip), "dma-mode", "trn2"),
        (transpose_with((16, 128), priority=3), "target", "trn2"),
        (transpose_with((16, 128), axes=(0, 1)), "dma-transpose-axes", "trn2"),
        (gather_transpose(), None, "trn2"),
        (gather_transpose((256, 128), (128, 2)), None, "trn2"),
        (gather_transpose((32, 2, 1, 8)), None, "trn2"),
        (gather_transpose(), "target", "trn1"),
        (gather_transpose(dge_mode=mode.hwdge), "dma-mode", "trn2"),
        (gather_transpose(index_dtype=nl.int32), "operand-dtype", "trn2"),
        (gather_transpose(dtype=nl.float32), "dma-transpose-indirect", "trn2"),
        (gather_transpose((24, 128)), "dma-transpose-indirect", "trn2"),
        (gather_transpose((128, 2, 2, 8)), "dma-transpose-indirect", "trn2"),
        (gather_transpose((128, 8), (64, 2)), "dma-transpose-indirect", "trn2"),
        (gather_transpose((16, 8), (17, 1)), "dma-transpose-indirect", "trn2"),
        (gather_transpose((128, 8), (128, 1, 1)), "dma-transpose-indirect", "trn2"),
        (gather_transpose((128, 8), (64, 1)), "dynamic-bounds", "trn2"),
    ],
)
def test_modes_and_limits_of_dma_transpose(kernel, rule, target):
    index = np.zeros((16, 1), np.int32)
    if rule is None:
        simulate(kernel, target=target)(X, index)
    else:
        assert rule_of(kernel, X, index, target=target) == rule


# dma_compute.


@given(st.integers(1, 16), any_dtype, any_dtype, seeds)
@cases
def test_dma_compute_sums_in_float32(count, source, destination, seed):
    xs = [sample(seed + i, (16, 5), source, -8, 8) for i in range(count)]

    def body(*arrays):
        tiles = [load(a, source) if i % 2 else a for i, a in enumerate(arrays)]
        dst = nl.ndarray((16, 5), getattr(nl, destination))
        nisa.dma_compute(dst, tiles, nl.add, scales=[1.0] * count)
        return [dst]

    got = run(body, *(host(x, source) for x in xs))[0]
    close(got, dma.dma_compute(xs), destination, steps=count, magnitude=sum(abs(x) for x in xs))


@given(ROWS, st.booleans(), st.booleans(), seeds)
@cases
def test_scatter_add(rows, outside, first, seed):
    x, base = sample(seed, (rows, 6)), sample(seed + 1, (140, 6))
    index = row_index(seed, rows, 140, outside)

    def kernel(a, i, b):
        dst = out(b)
        nisa.dma_copy(dst, b)
        target, tile = dst.vector_select(0, load(i, "int32")), load(a, "float32")
        srcs = [target, tile] if first else [tile, target]
        nisa.dma_compute(target, srcs, nl.add, oob_mode=oob.skip if outside else oob.error)
        return dst

    flat = dma.access_pattern(base.shape, [[0, rows], [1, 6]], vector_offset=index)
    got = simulate(kernel)(host(x, "f"), index, host(base, "f"))
    close(got.astype(np.float64), dma.scatter_add(base, flat, x), "float32", magnitude=8)


@given(ROWS, st.booleans(), seeds)
@cases
def test_gather_add(rows, outside, seed):
    x, base = sample(seed, (rows, 6)), sample(seed + 1, (140, 6))
    index = row_index(seed, rows, 140, outside)

    def body(a, i, b):
        dst = load(a, "float32")
        src = b.vector_select(0, load(i, "int32"))
        nisa.dma_compute(dst, [src, dst], nl.add, oob_mode=oob.skip if outside else oob.error)
        return [dst]

    flat = dma.access_pattern(base.shape, [[0, rows], [1, 6]], vector_offset=index)
    close(run(body, host(x, "f"), index, host(base, "f"))[0], dma.gather_add(x, base, flat), "float32", magnitude=8)


def compute_with(choose, **options):
    """A dma_compute whose (dst, sources) `choose` takes from an HBM tensor, rows of it, and an SBUF tile."""

    def kernel(a, i):
        base, tile = nl.zeros((64, 8), nl.float32, nl.hbm), nl.zeros((16, 8), nl.float32)
        rows = base.vector_select(0, load(i, "int32"))
        dst, srcs = choose(a, base, rows, tile)
        nisa.dma_compute(dst, srcs, **{"reduce_op": nl.add, **options})

    return kernel


def at_run_time(a, base, rows, tile):
    return tile, [a.ap([[8, 16], [1, 8]], scalar_offset=nisa.register_alloc(1)), tile]


@pytest.mark.parametrize(
    ("kernel", "rule"),
    [
        (compute_with(lambda a, base, rows, tile: (rows, [rows, tile])), None),
        (compute_with(lambda a, base, rows, tile: (tile, [rows, tile])), None),
        (compute_with(lambda a, base, rows, tile: (tile, [tile, tile])), None),
        (compute_with(lambda a, base, rows, tile: (rows, [rows, tile, tile])), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (rows, [tile, tile])), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (rows, [rows, a[0:16]])), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (tile, [rows, a[0:16]])), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (base[0:16], [rows, base[0:16]])), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (rows, [rows, tile]), unique_indices=False), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (a, [a] * 17)), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (a, [])), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (a, [a, a]), scales=[1.0]), "dma-compute"),
        (compute_with(lambda a, base, rows, tile: (a, [a, tile])), "element-count"),
        (compute_with(at_run_time), "dma-compute"),
    ],
)
def test_limits_of_dma_compute(kernel, rule):
    index = np.arange(16, dtype=np.int32)[:, None]
    if rule is None:
        simulate(kernel, target="trn2")(X, index)
    else:
        assert rule_of(kernel, X, index, target="trn2") == rule


def test_a_scatter_names_rows_that_occur_twice():
    kernel = compute_with(lambda a, base, rows, tile: (rows, [rows, tile]))
    assert rule_of(kernel, X, np.zeros((16, 1), np.int32)) == "dma-compute"
