"""Arguments that a kernel returns, and arrays that are not plain memory: strided, expanded, read-only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from nki_parallel_attn.sim import NkiValidationError, jit
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
