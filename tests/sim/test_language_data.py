"""nki.language: moving data, constants, addresses, the launch grid, and hints that change no result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nki_parallel_attn.sim import NkiValidationError, jit, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

X = np.random.default_rng(0).standard_normal((20, 12)).astype(np.float32)


def stored(tile):
    """A tile as a kernel result."""
    out = nl.ndarray(tile.shape, tile.dtype, nl.shared_hbm)
    nl.store(out, value=tile)
    return out


def bf16(values):
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16()


def test_load_and_store_cast_on_the_way():
    x = torch.from_numpy(X)

    def kernel(a):
        out = nl.ndarray(a.shape, nl.float32, nl.shared_hbm)
        nl.store(out, nl.load(a, dtype=nl.bfloat16))
        return stored(nl.load(a)), stored(nl.load(a, nl.bfloat16)), out

    same, narrow, wide = simulate(kernel)(x)
    assert torch.equal(same, x)
    assert torch.equal(narrow, bf16(X))
    assert torch.equal(wide, bf16(X).float())


def test_load_transpose2d():
    def kernel(a):
        return stored(nl.load_transpose2d(a)), stored(nl.load_transpose2d(a[2:9], dtype=nl.bfloat16))

    whole, part = simulate(kernel)(torch.from_numpy(X))
    assert torch.equal(whole, torch.from_numpy(X.T))
    assert torch.equal(part, bf16(X[2:9].T))
    with pytest.raises(NkiValidationError):
        simulate(lambda a: stored(nl.load_transpose2d(a.reshape((20, 3, 4)))))(X)


@pytest.mark.parametrize("lnc", [1, 2])
def test_shared_constant_of_an_array_or_a_file(lnc, tmp_path):
    np.save(tmp_path / "constant.npy", X)
    small = np.array([[1, -2, 3]], np.int8)

    def kernel(a):
        first, second = nl.shared_constant(X), nl.shared_constant(str(tmp_path / "constant.npy"))
        assert first.buffer is nl.shared_hbm and first.dtype == nl.float32
        numbers = nl.shared_constant(small)
        outs = [nl.ndarray(t.shape, t.dtype, nl.shared_hbm) for t in (first, second, numbers)]
        if nl.program_id(0) == 0:
            for out, constant in zip(outs, (first, second, numbers), strict=True):
                nisa.dma_copy(dst=out, src=constant)
        return tuple(outs)

    results = simulate(kernel, lnc=lnc)(X)
    for result, expected in zip(results, (X, X, small), strict=True):
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == expected.dtype


def test_shared_identity_matrix():
    def kernel(a):
        given = nl.ndarray((7, 7), nl.float32)
        same = nl.shared_identity_matrix(7, dst=given)
        assert same is given and nl.shared_identity_matrix(3).dtype == nl.uint8
        return stored(given), stored(nl.shared_identity_matrix(n=128, dtype=nl.float32))

    for result, n in zip(simulate(kernel)(X), (7, 128), strict=True):
        np.testing.assert_array_equal(result, np.eye(n))


def test_the_launch_grid():
    seen = []

    def kernel(a):
        seen.append((nl.program_ndim(), nl.num_programs(), nl.num_programs(axes=0), nl.program_id(axis=0)))

    simulate(kernel)(X)
    simulate(kernel, lnc=2)(X)
    assert seen == [(0, 1, 1, 0), (1, 2, 2, 0), (1, 2, 2, 1)]
    with pytest.raises(NkiValidationError):
        simulate(lambda a: nl.program_id(1))(X)


def test_tensors_at_one_address_are_one_memory():
    def kernel(a):
        whole = nl.ndarray((20, 12), nl.float32, address=(32, 256))
        nisa.dma_copy(whole, a)
        return stored(nl.ndarray((20, 6), nl.float32, address=(32, 256 + 24))), stored(whole.view(nl.uint16)[:, 0:2])

    right, bits = simulate(kernel)(X)
    np.testing.assert_array_equal(right, X[:, 6:])
    np.testing.assert_array_equal(bits, X.view(np.uint16)[:, 0:2])


def test_hints_change_no_result():
    @jit
    def kernel(a):
        tile = nl.load(a)
        with nl.no_reorder():
            first = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0, name="first")
            second = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0, name="second")
        third = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=-2.0)
        assert third.depends_on(second, first) is third and third.depends_on(first).depends_on(second) is third
        return stored(tile)

    for launched in (kernel, kernel.with_schedule([("second", "first")]), kernel.with_schedule([("a", ["b", "c"])])):
        np.testing.assert_allclose(launched(X), 2 * X, rtol=1e-5, atol=1e-6)
