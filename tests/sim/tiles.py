"""Tiles of random values in random places, and the comparison of results with their float64 evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim import simulate

from .oracle import dtypes

FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "tfloat32")
INTEGERS = ("int16", "int32", "int8", "uint16", "uint32", "uint8")
any_float = st.sampled_from(FLOATS)
any_dtype = st.sampled_from((*FLOATS, *INTEGERS))
any_integer = st.sampled_from(INTEGERS)
seeds = st.integers(0, 2**31)
cases = settings(max_examples=50, deadline=None)

partition_counts = st.sampled_from((1, 5, 32, 33, 64, 96, 128))
shapes = st.one_of(
    st.tuples(partition_counts, st.integers(1, 40)), st.tuples(partition_counts, st.integers(1, 6), st.integers(1, 7))
)


@dataclass(frozen=True)
class Place:
    """Where a tile lies: as a whole tensor, or as a strided, shifted, permuted or broadcast view; in SBUF or PSUM."""

    view: str = "whole"
    psum: bool = False


VIEWS = ("whole", "strided", "shifted", "permuted")
in_sbuf = st.builds(Place, st.sampled_from(VIEWS))
on_chip = st.builds(Place, st.sampled_from(VIEWS), st.booleans())
read_in_sbuf = st.builds(Place, st.sampled_from((*VIEWS, "broadcast")))
read_on_chip = st.builds(Place, st.sampled_from((*VIEWS, "broadcast")), st.booleans())


def sample(seed, shape, dtype="float32", low=-4.0, high=4.0, place=None):
    """float64 values that `dtype` holds exactly, equal along the last dim when they go into a broadcast view."""
    low = max(low, 0) if dtype.startswith("u") else low
    values = dtypes.round_to(np.random.default_rng(seed).uniform(low, high, shape), dtype)
    values = values + 0.0 if dtype in INTEGERS else values  # integers have no -0
    return np.repeat(values[..., :1], values.shape[-1], -1) if place and place.view == "broadcast" else values


def sample_bits(seed, shape, dtype, place=None):
    """Integers over the whole range of `dtype`."""
    info = np.iinfo(dtype)
    values = np.random.default_rng(seed).integers(info.min, info.max, shape, dtype=np.int64, endpoint=True)
    return np.repeat(values[..., :1], values.shape[-1], -1) if place and place.view == "broadcast" else values


def host(values, dtype):
    """The kernel argument for `values`: integers as they are, floats as float32 for `load` to cast."""
    return np.asarray(values).astype(dtype if dtype in INTEGERS else "float32")


def empty(shape, dtype, place=Place()):
    """An uninitialised tile in its place; around it nothing is written."""
    buffer = nl.psum if place.psum else nl.sbuf
    kind = getattr(nl, dtype)
    if place.view == "strided":
        return nl.ndarray((*shape[:-1], 2 * shape[-1]), kind, buffer)[..., ::2]
    if place.view == "shifted":
        partitions = shape[0]
        first = 96 if partitions <= 32 else 64 if partitions <= 64 else 0
        wide = nl.ndarray((first + partitions, *shape[1:-1], shape[-1] + 3), kind, buffer)
        return wide[first : first + partitions, ..., 3 : 3 + shape[-1]]
    if place.view == "permuted" and len(shape) == 3:
        return nl.ndarray((shape[0], shape[2], shape[1]), kind, buffer).permute((0, 2, 1))
    return nl.ndarray(shape, kind, buffer)


def load(source, dtype, place=Place()):
    """A tile in its place with the values of an HBM tensor."""
    if place.view == "broadcast":
        narrow = load(source[..., 0:1], dtype, Place("whole", place.psum))
        return narrow.broadcast(len(source.shape) - 1, source.shape[-1])
    target = empty(source.shape, dtype, place)
    if place.psum:
        whole = nl.ndarray(source.shape, target.dtype)
        nisa.dma_copy(whole, source)
        nisa.tensor_copy(target, whole)
    else:
        nisa.dma_copy(target, source)
    return target


def run(body, *arrays, target="trn3", seed=0):
    """float64 values of the tiles that `body`, called with the arrays in HBM, returns."""

    def kernel(*inputs):
        outs = []
        for result in body(*inputs):
            if result.buffer is nl.psum:
                whole = nl.ndarray(result.shape, result.dtype)
                nisa.tensor_copy(whole, result)
                result = whole
            outs.append(nl.ndarray(result.shape, result.dtype, nl.shared_hbm))
            nisa.dma_copy(outs[-1], result)
        return tuple(outs)

    return [np.asarray(r).astype(np.float64) for r in simulate(kernel, target=target, seed=seed)(*arrays)]


def close(got, exact, dtype, steps=2, magnitude=None):
    """`got` is `exact` after `steps` float32 roundings of numbers up to `magnitude`, and one rounding to `dtype`.

    The bound per element is half a unit in the last place of dtype plus steps * 2^-23 * magnitude.
    """
    exact = np.asarray(exact, np.float64)
    got = np.asarray(got, np.float64)
    expected = dtypes.round_to(exact, dtype)
    assert got.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    exact = np.clip(exact, *dtypes.INTEGERS[dtype]) if dtype in dtypes.INTEGERS else exact
    size = np.abs(exact) if magnitude is None else magnitude
    largest = np.maximum(np.abs(got), np.abs(np.where(finite, exact, 0)))
    bound = 0.5 * dtypes.ulp(largest, dtype) + steps * 2.0**-23 * size
    wrong = ~(np.abs(np.where(finite, got, 0) - np.where(finite, exact, 0)) <= bound) & finite
    assert not wrong.any(), (
        f"{got[wrong][0]} is not {exact[wrong][0]} in {dtype}, bound {np.broadcast_to(bound, got.shape)[wrong][0]}"
    )


def same(got, expected, dtype):
    """`got` is exactly what `dtype` holds of `expected`."""
    np.testing.assert_array_equal(got, dtypes.round_to(expected, dtype).reshape(got.shape))
