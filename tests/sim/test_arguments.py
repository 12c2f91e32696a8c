"""Arguments that a kernel returns, that share memory, and that are not plain memory: strided, expanded, read-only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from nki_parallel_attn.sim import NkiValidationError, jit, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim.tensor import NkiTensor


class Results(NamedTuple):
    doubled: NkiTensor
    given: NkiTensor


def double(x, out):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=tile)


@jit
def doubled(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    double(x, out)
    return Results(out, x)


@jit
def double_in_place(x):
    double(x, x)
    return x


@jit
def transposed_argument(x):
    return x.permute((1, 0))


def numbers():
    return np.arange(16, dtype=np.float32).reshape(4, 4)


def test_a_view_of_an_argument_is_not_the_argument():
    x = numbers()
    np.testing.assert_array_equal(transposed_argument(x), x.T)


def test_named_tuples_stay_named_tuples():
    x = numbers()
    results = doubled(x)
    assert type(results) is Results and results.given is x
    np.testing.assert_array_equal(results.doubled, 2 * x)


@pytest.mark.parametrize(
    "array",
    [numbers()[:, ::2], numbers()[::-1], torch.arange(16.0).reshape(4, 4).T, np.arange(16).reshape(4, 4)],
    ids=["strided", "backwards", "transposed", "int64"],
)
def test_copied_arguments_are_written_back(array):
    before = array.copy() if isinstance(array, np.ndarray) else array.clone()
    assert double_in_place(array) is array
    assert (array == 2 * before).all()


@pytest.mark.parametrize(
    "array",
    [np.broadcast_to(np.ones((1, 4), np.float32), (4, 4)), torch.ones(1, 4).expand(4, 4)],
    ids=["read-only", "expanded"],
)
def test_arrays_that_cannot_be_written_are_inputs_only(array):
    assert (doubled(array).doubled == 2).all()
    with pytest.raises(NkiValidationError, match=r"\[kernel-argument\] the kernel wrote to argument0"):
        double_in_place(array)
    assert (array == 1).all()


@jit
def double_first(x, y):
    """Doubles x in place, then copies y."""
    double(x, x)
    out = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=y)
    return x, out


@jit
def copies(x, y):
    outs = [nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.shared_hbm) for t in (x, y)]
    for out, t in zip(outs, (x, y), strict=True):
        nisa.dma_copy(dst=out, src=t)
    return outs


OVERLAPPING = {
    "strided columns": lambda x: (x[:, 0:3], x[:, 1:4]),
    "the whole and a transposed view": lambda x: (x, x.T),
    "rows, which lie in memory as they are": lambda x: (x[0:3], x[1:4]),
    "every second row": lambda x: (x[::2], x[:3]),
}


@pytest.mark.parametrize("make", [numbers, lambda: torch.from_numpy(numbers())], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_arguments_that_overlap_are_read_but_not_written(make, name):
    whole = make()
    one, other = OVERLAPPING[name](whole)
    before = numbers()
    for got, expected in zip(copies(one, other), OVERLAPPING[name](before), strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected)
    for pair in ((one, other), (other, one)):
        with pytest.raises(
            NkiValidationError, match=r"writes to argument0, which shares memory with argument1"
        ) as caught:
            double_first(*pair)
        assert caught.value.rule == "argument-overlap" and __file__ in caught.value.location
        np.testing.assert_array_equal(np.asarray(whole), before)


@pytest.mark.parametrize(
    "views",
    [lambda x: (x[:, :2], x[:, 2:]), lambda x: (x[:, ::2], x[:, 1::2]), lambda x: (x[:2], x[2:])],
    ids=["halves of columns", "alternating columns", "halves of rows"],
)
def test_arguments_that_interleave_are_written(views):
    x = numbers()
    one, other = views(x)
    expected_one, expected_other = 2 * one, other.copy()
    returned, copy = double_first(one, other)
    assert returned is one
    np.testing.assert_array_equal(one, expected_one)
    np.testing.assert_array_equal(other, expected_other)
    np.testing.assert_array_equal(copy, expected_other)


def test_one_array_given_twice_is_one_tensor():
    for x, view in ((numbers(), False), (numbers(), True), (torch.arange(16.0).reshape(4, 4).T, True)):
        again = x[:] if view else x
        expected = 2 * np.asarray(x).copy()
        _, copy = double_first(x, again)
        np.testing.assert_array_equal(np.asarray(copy), expected)
        np.testing.assert_array_equal(np.asarray(x), expected)


def test_ranks_share_what_they_read_only():
    x, y = numbers(), numbers()
    simulation = simulate(double_first, world_size=2)
    results = simulation([(numbers(), y), (numbers(), y)])
    assert all((copy == y).all() for _, copy in results)
    with pytest.raises(
        NkiValidationError, match=r"writes to argument0, which shares memory with argument0 of rank [01]"
    ):
        simulation([(x, y), (x, y)])
    with pytest.raises(NkiValidationError, match=r"shares memory with argument1 of rank 1"):
        simulation([(x, y), (numbers(), x[1:])])
    np.testing.assert_array_equal(x, numbers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int32])
def test_an_argument_may_start_inside_its_memory(dtype):
    """torch's as_strided counts from the start of the memory, not of the view."""
    whole = (torch.arange(48).reshape(6, 8) % 5 > 1).to(dtype) if dtype is torch.bool else torch.arange(48).to(dtype)
    whole = whole.reshape(6, 8)
    for rows in (whole[2:5], whole[1:], whole[5]):

        @jit
        def kernel(x):
            out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
            nisa.dma_copy(dst=out, src=x)
            return out, x[1:] if len(x.shape) == 2 else x

        copy, _ = kernel(rows)
        assert torch.equal(copy, rows)


def test_a_write_to_an_argument_that_starts_inside_its_memory_lands_there():
    whole = torch.ones(6, 8)
    double_in_place(whole[2:5])
    assert (whole[2:5] == 2).all() and (whole[:2] == 1).all() and (whole[5:] == 1).all()
    words = torch.arange(48, dtype=torch.int32).reshape(6, 8)

    @jit
    def low_halves(x):
        out = nl.ndarray((2, 16), dtype=nl.int16, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x.view(nl.int16))
        return out

    assert torch.equal(low_halves(words[3:5]), words[3:5].view(torch.int16))


class Plain(nl.NKIObject):
    rows: int
    scale: float = 2.0

    def __post_init__(self):
        self.size = 8 * (self.rows or 0)


class Shaped(Plain):
    def __init__(self, rows):
        self.rows = rows


def test_objects_of_kernels_get_the_documented_constructor():
    def kernel(x, given):
        made = Plain(3)
        assert (made.rows, made.scale, made.size, Plain().rows, Plain(scale=1.0).scale) == (3, 2.0, 24, None, 1.0)
        assert given.rows == 4 and given.scale == 2.0
        return x

    simulate(kernel)(np.ones((2, 2), np.float32), Shaped(4))
    with pytest.raises(TypeError, match="takes 2 arguments"):
        Plain(1, 2, 3)
    with pytest.raises(TypeError, match="multiple values"):
        Plain(1, rows=2)
