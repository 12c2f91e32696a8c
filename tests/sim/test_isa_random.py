"""Random numbers: the documented distribution, reproducible from the simulation's seed and from the engines' states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import dtypes, vector
from .tiles import FLOATS, any_dtype, any_integer, cases, empty, host, load, on_chip, run, sample, sample_bits, seeds

NOTHING = np.zeros((1, 1), np.float32)
UNITS = {"gpsimd": 6, "vector": 24}
shapes = st.tuples(st.sampled_from((1, 33, 128)), st.integers(1, 40))


def numbers(shape, dtype="uint32", unit="vector", seed=0, place=None):
    def body(_):
        dst = empty(shape, dtype, place) if place else empty(shape, dtype)
        nisa.rng(dst, getattr(nisa.engine, unit))
        return [dst]

    return run(body, NOTHING, seed=seed)[0]


@pytest.mark.parametrize("unit", UNITS)
def test_bits_are_fair_independent_and_reproducible(unit):
    shape = (128, 256)
    first = numbers(shape, unit=unit).astype(np.int64)
    bits = first[..., None] >> np.arange(32) & 1
    count = bits[..., 0].size
    assert np.all(np.abs(bits.sum((0, 1)) - count / 2) < 6 * np.sqrt(count) / 2)
    # Neighbours along the partition and along the free dimension agree in half of their bits.
    for other in (bits[1:, :] == bits[:-1, :], bits[:, 1:] == bits[:, :-1]):
        assert abs(other.sum() - other.size / 2) < 6 * np.sqrt(other.size) / 2
    assert np.array_equal(first, numbers(shape, unit=unit).astype(np.int64))
    assert not np.array_equal(first, numbers(shape, unit=unit, seed=1).astype(np.int64))


@given(any_integer, shapes, on_chip, seeds)
@cases
def test_narrow_integers_are_the_low_bits(dtype, shape, place, seed):
    wide = numbers(shape, "uint32", seed=seed).astype(np.uint32)
    narrow = numbers(shape, dtype, seed=seed, place=place)
    np.testing.assert_array_equal(narrow, wide.astype(dtype))


def test_cores_and_engines_draw_different_numbers():
    assert not np.array_equal(numbers((128, 8), unit="vector"), numbers((128, 8), unit="gpsimd"))


def test_a_seed_restarts_the_vector_engine():
    def body(seed_a, seed_b):
        drawn = [nl.ndarray((128, 9), nl.uint32) for _ in range(4)]
        for dst, seed in zip(drawn, (seed_a, seed_b, seed_a, None), strict=True):
            if seed is not None:
                nisa.set_rng_seed(load(seed, "uint32"))
            nisa.rng(dst)
        return drawn

    first, other, again, later = run(body, np.full((1, 1), 7, np.uint32), np.full((1, 1), 8, np.uint32))
    assert np.array_equal(first, again) and not np.array_equal(first, other) and not np.array_equal(first, later)


@pytest.mark.parametrize("unit", UNITS)
@given(st.sampled_from((1, 32, 128)), st.integers(1, 40), seeds)
@cases
def test_a_saved_state_continues_where_it_was(unit, partitions, elements, seed):
    engine, words = getattr(nisa.engine, unit), UNITS[unit]

    def body(_):
        state, before, after = (nl.ndarray((partitions, n), nl.uint32) for n in (words, elements, elements))
        nisa.rand_get_state(state, engine)
        nisa.rng(before, engine)
        nisa.rng(after, engine)
        repeated = nl.ndarray((partitions, elements), nl.uint32)
        nisa.rand_set_state(state, engine)
        nisa.rng(repeated, engine)
        return [before, after, repeated]

    before, after, repeated = run(body, NOTHING, seed=seed)
    assert np.array_equal(before, repeated)
    assert not np.array_equal(before, after)


def xorwow(x, y, z, w, v, counter):
    """The published generator, on Python integers."""
    while True:
        t = x ^ (x >> 2)
        x, y, z, w = y, z, w, v
        v = (v ^ (v << 4) ^ t ^ (t << 1)) % 2**32
        counter = (counter + 362437) % 2**32
        yield (v + counter) % 2**32


@given(seeds)
@cases
def test_gpsimd_partitions_run_xorwow_from_their_six_words(seed):
    words = sample_bits(seed, (5, 6), "uint32")

    def body(a):
        dst = nl.ndarray((5, 12), nl.uint32)
        nisa.rand_set_state(load(a, "uint32"))
        for columns in (dst[:, :3], dst[:, 3:]):
            nisa.rng(columns, nisa.engine.gpsimd)
        return [dst]

    got = run(body, host(words, "uint32"), target="trn2")[0]
    for row, state in zip(got, words, strict=True):
        assert [int(value) for value in row] == [next_ for next_, _ in zip(xorwow(*map(int, state)), row, strict=False)]


RAND2 = ("float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32", "int8", "int16", "int32", "uint8",
         "uint16", "uint32")  # fmt: skip


@given(st.sampled_from(RAND2), st.booleans(), st.sampled_from((32, 128)), on_chip, seeds)
@cases
def test_rand2_is_uniform(dtype, vectors, partitions, place, seed):
    shape = (partitions, 200)
    low, high = (sample(seed + i, (partitions, 1), low=bound, high=bound + 5.0) for i, bound in ((0, 1.0), (1, 10.0)))
    low, high = (low, high) if vectors else (low * 0 + 1.5, high * 0 + 9.25)

    def body(a, b):
        dst = empty(shape, dtype, place)
        nisa.rand2(dst, *((load(a, "float32"), load(b, "float32")) if vectors else (1.5, 9.25)))
        return [dst]

    got = run(body, host(low, "float32"), host(high, "float32"), seed=seed)[0]
    edges = [dtypes.round_to(edge, dtype) for edge in (low, high)]
    assert np.all(got >= edges[0]) and np.all(got <= edges[1])
    if dtype == "float32":
        unit = (got - low) / (high - low)
        assert abs(unit.mean() - 0.5) < 6 / np.sqrt(12 * unit.size)
        assert abs((unit < 0.25).mean() - 0.25) < 6 * np.sqrt(0.1875 / unit.size)


@given(any_dtype, st.sampled_from((0.0, 0.2, 0.5, 1.0)), st.booleans(), on_chip, on_chip, seeds)
@cases
def test_dropout(dtype, probability, vectors, source, target, seed):
    shape = (64, 50)
    x = sample(seed, shape, dtype, 1.0, 4.0)

    def body(a, b):
        dst = empty(shape, dtype, target)
        nisa.dropout(dst, load(a, dtype, source), load(b, "float32") if vectors else probability)
        return [dst]

    got = run(body, host(x, dtype), np.full((64, 1), probability, np.float32), seed=seed)[0]
    assert vector.dropout_is_valid(x, got, probability)


def test_dropout_probabilities_hold_partition_by_partition():
    rates = np.linspace(0, 1, 5)[:, None]

    def body(a, b):
        dst = nl.ndarray((5, 4000), nl.int32)
        nisa.dropout(dst, load(a, "int32"), load(b, "float32"))
        return [dst]

    x = np.full((5, 4000), 2**30 + 1)
    got = run(body, host(x, "int32"), host(rates, "float32"))[0]
    assert all(vector.dropout_is_valid(x[i], got[i], rates[i, 0]) for i in range(5))
    assert "float32" in FLOATS and np.all(got[0] == x[0])
