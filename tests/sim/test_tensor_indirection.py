"""Tensor indirection (trn3) on every instruction of the Vector, Scalar and GpSimd Engines that documents it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nki_parallel_attn.sim import NkiValidationError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import gpsimd, scalar, vector
from .tiles import cases, close, host, load, run, sample, seeds

command = nisa.reduce_cmd
# name: how it is issued on (dst, data, a plain tile like data, [P, 1] for a result), and what dst then holds of data.
INSTRUCTIONS = {
    "tensor_copy on Vector": (lambda dst, x, y, r: nisa.tensor_copy(dst, x, nisa.engine.vector), lambda x, y: x),
    "tensor_copy on Scalar": (lambda dst, x, y, r: nisa.tensor_copy(dst, x, nisa.engine.scalar), lambda x, y: x),
    "tensor_tensor": (lambda dst, x, y, r: nisa.tensor_tensor(dst, x, y, nl.add), lambda x, y: x + y),
    "tensor_tensor on GpSimd": (
        lambda dst, x, y, r: nisa.tensor_tensor(dst, x, y, nl.subtract, nisa.engine.gpsimd), lambda x, y: x - y
    ),
    "tensor_scalar": (lambda dst, x, y, r: nisa.tensor_scalar(dst, x, nl.multiply, 2.0), lambda x, y: 2 * x),
    "tensor_scalar_reduce": (
        lambda dst, x, y, r: nisa.tensor_scalar_reduce(dst, x, nl.add, 1.0, nl.add, r), lambda x, y: x + 1
    ),
    "tensor_scalar_cumulative": (
        lambda dst, x, y, r: nisa.tensor_scalar_cumulative(dst, x, nl.add, nl.maximum, 0.0),
        lambda x, y: vector.tensor_scalar_cumulative(x, "add", "maximum", 0.0)[0],
    ),
    "activation": (lambda dst, x, y, r: nisa.activation(dst, nl.square, x), lambda x, y: x * x),
    "activation_reduce": (
        lambda dst, x, y, r: nisa.activation_reduce(dst, nl.tanh, x, nl.add, r), lambda x, y: np.tanh(x)
    ),
    "activate2": (
        lambda dst, x, y, r: nisa.activate2(dst, nl.gelu, x, 2.0, 0.0, nl.multiply, nl.bypass),
        lambda x, y: scalar.apply("gelu", 2 * x),
    ),
    "exponential": (lambda dst, x, y, r: nisa.exponential(dst, x, 1.0), lambda x, y: np.exp(x - 1)),
}  # fmt: skip
partition_counts = st.sampled_from((16, 32, 48, 128))


def offsets(seed, partitions, count, width):
    """An index tensor for `count` different offsets below `width` in each 16 partitions."""
    random = np.random.default_rng(seed)
    index = np.zeros((partitions, -(-count // 16)), np.int64)
    for start in range(0, partitions, 16):
        chosen = np.zeros(16 * index.shape[1], np.int64)
        chosen[:count] = random.permutation(width)[:count]
        index[start : start + 16] = chosen.reshape(-1, 16).T
    return index


@pytest.mark.parametrize("name", INSTRUCTIONS)
@given(partition_counts, st.integers(1, 20), st.booleans(), st.booleans(), seeds)
@cases
def test_gather_and_scatter(name, partitions, count, gathers, scatters, seed):
    issue, formula = INSTRUCTIONS[name]
    width = 24
    source = sample(seed, (partitions, width if gathers else count))
    other, before = sample(seed + 1, (partitions, count)), sample(seed + 2, (partitions, width))
    from_, to = offsets(seed + 3, partitions, count, width), offsets(seed + 4, partitions, count, width)

    def body(a, b, c, i, j):
        data = load(a, "float32")
        dst = load(c, "float32") if scatters else nl.ndarray((partitions, count), nl.float32)
        issue(
            dst.indirect(load(j, "uint32"), count) if scatters else dst,
            data.indirect(load(i, "uint16"), count) if gathers else data,
            load(b, "float32"),
            nl.ndarray((partitions, 1), nl.float32),
        )
        return [dst]

    read = gpsimd.indirect_gather(source, from_, count) if gathers else source
    result = formula(read, other)
    expected = gpsimd.indirect_scatter(before, to, result, count) if scatters else result
    arrays = (host(source, "float32"), host(other, "float32"), host(before, "float32"))
    got = run(body, *arrays, host(from_, "uint16"), host(to, "uint32"))[0]
    close(got, expected, "float32", steps=16, magnitude=np.abs(expected) + 1)


@given(partition_counts, st.integers(1, 20), seeds)
@cases
def test_reduction_of_gathered_elements(partitions, count, seed):
    x, index = sample(seed, (partitions, 24)), offsets(seed, partitions, count, 24)

    def body(a, i):
        dst = nl.ndarray((partitions, 1), nl.float32)
        nisa.tensor_reduce(dst, nl.maximum, load(a, "float32").indirect(load(i, "uint32"), count), 1)
        return [dst]

    got = run(body, host(x, "float32"), host(index, "uint32"))[0]
    np.testing.assert_array_equal(got, np.float32(gpsimd.indirect_gather(x, index, count)).max(1, keepdims=True))


@given(partition_counts, st.integers(1, 20), seeds)
@cases
def test_predicated_copy_scatters_where_a_gathered_predicate_holds(partitions, count, seed):
    x, before = sample(seed, (partitions, count)), sample(seed + 1, (partitions, 24))
    mask = np.random.default_rng(seed).integers(0, 2, (partitions, 24))
    from_, to = offsets(seed + 3, partitions, count, 24), offsets(seed + 4, partitions, count, 24)

    def body(a, b, m, i, j):
        dst = load(b, "float32")
        predicate = load(m, "uint8").indirect(load(i, "uint32"), count)
        nisa.tensor_copy_predicated(dst.indirect(load(j, "uint32"), count), load(a, "float32"), predicate)
        return [dst]

    got = run(body, *(host(a, "float32") for a in (x, before)), host(mask, "uint8"), host(from_, "uint32"),
              host(to, "uint32"))[0]  # fmt: skip
    kept = gpsimd.indirect_gather(before, to, count)
    values = np.where(gpsimd.indirect_gather(mask, from_, count) != 0, x, kept)
    np.testing.assert_array_equal(got, np.float32(gpsimd.indirect_scatter(before, to, values, count)))


def fails(rule, body, target="trn3"):
    def kernel():
        body()

    with pytest.raises(NkiValidationError) as caught:
        simulate(kernel, target=target)()
    assert caught.value.rule == rule, caught.value


def placed(shape, dtype, partition, offset=0, buffer=nl.sbuf):
    tile = nl.ndarray(shape, dtype, buffer, address=(partition, offset))
    nisa.memset(tile, 0)
    return tile


def test_an_offset_beyond_the_rows_of_the_index_is_an_error():
    def body():
        data, index = placed((4, 8), nl.float32, 0), placed((4, 1), nl.uint16, 0, 1024)
        nisa.tensor_copy(nl.ndarray((4, 4), nl.float32), data.indirect(index))
        nisa.tensor_copy(nl.ndarray((4, 5), nl.float32), data.indirect(index, 5))

    fails("dynamic-bounds", body)


def test_data_starts_where_its_index_does():
    def body():
        data, index = placed((32, 8), nl.float32, 0), placed((32, 1), nl.uint16, 32)
        nisa.tensor_copy(nl.ndarray((32, 4), nl.float32), data.indirect(index, 4))

    fails("tensor-indirection-partition", body)


def test_the_index_of_a_scattered_dst_starts_where_data_does():
    def body():
        data, dst = placed((32, 4), nl.float32, 64), placed((32, 8), nl.float32, 0)
        nisa.activation(dst.indirect(placed((32, 1), nl.uint16, 32), 4), nl.exp, data)

    fails("tensor-indirection-partition", body)


def test_manual_addresses_that_agree_pass():
    def kernel():
        data, index = placed((32, 8), nl.float32, 32), placed((32, 1), nl.uint16, 32, 1024)
        dst, places = placed((32, 8), nl.float32, 0), placed((32, 1), nl.uint16, 32, 2048)
        nisa.tensor_copy(dst.indirect(places, 4), data.indirect(index, 4))

    simulate(kernel, target="trn3")()


def test_the_scalar_engine_does_not_scatter_into_psum():
    def body():
        data, index = placed((32, 4), nl.float32, 0), placed((32, 1), nl.uint16, 0, 1024)
        dst = nl.ndarray((32, 8), nl.float32, nl.psum)
        nisa.activation(dst.indirect(index, 4), nl.exp, data)

    fails("memory-access", body)


def test_gpsimd_does_not_copy_with_indirection():
    def body():
        data, index = placed((32, 8), nl.float32, 0), placed((32, 1), nl.uint16, 0, 1024)
        nisa.tensor_copy(nl.ndarray((32, 4), nl.float32), data.indirect(index, 4), nisa.engine.gpsimd)

    fails("engine-choice", body)


def test_trn2_has_no_tensor_indirection():
    def body():
        data, index = placed((32, 8), nl.float32, 0), placed((32, 1), nl.uint16, 0, 1024)
        nisa.tensor_copy(nl.ndarray((32, 4), nl.float32), data.indirect(index, 4))

    fails("target", body, "trn2")
