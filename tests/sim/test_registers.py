"""Registers: what they carry from tensor to tensor, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nki_parallel_attn.sim import NkiValidationError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .tiles import cases, load, sample, sample_bits, seeds


def loaded(tile):
    """A register with the value of a tile."""
    register = nisa.register_alloc()
    nisa.register_load(register, tile)
    return register


@given(st.sampled_from(("int8", "uint8", "int16", "uint16", "int32", "uint32", "float32")), seeds, st.booleans())
@cases
def test_registers_carry_integers_and_float32(dtype, seed, hbm):
    x = sample(seed, (1, 1)) if dtype == "float32" else sample_bits(seed, (1, 1), dtype)

    def kernel(a):
        first, second = nisa.register_alloc(), nisa.register_alloc(0)
        nisa.register_load(first, a if hbm else load(a, dtype))
        nisa.register_move(second, first)
        result = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
        if hbm:
            nisa.register_store(result, second)
        else:
            tile = nl.ndarray((1, 1), a.dtype)
            nisa.register_store(tile, second)
            nisa.dma_copy(result, tile)
        return result

    np.testing.assert_array_equal(simulate(kernel)(x.astype(dtype)), x)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda tile: nisa.register_alloc(1.5),
        lambda tile: nisa.register_alloc(2**32),
        lambda tile: nisa.register_move(nisa.register_alloc(), 0.5),
        lambda tile: nisa.register_move(3, 3),
        lambda tile: nisa.register_load(nisa.register_alloc(), nl.copy(tile, nl.bfloat16)),
        lambda tile: nisa.register_store(tile, nisa.register_alloc(0)),
        lambda tile: nisa.register_store(nl.copy(tile, nl.int32), loaded(tile)),
        lambda tile: nl.fori_loop(0, loaded(tile), lambda i: None),
        lambda tile: nl.copy(nl.zeros((1, 4), nl.float32).select(1, loaded(tile))),
    ],
)
def test_registers_hold_32_bit_integers_or_float32_and_convert_neither(break_it):
    with pytest.raises(NkiValidationError) as caught:
        simulate(lambda: break_it(nl.zeros((1, 1), nl.float32)))()
    assert caught.value.rule == "register"


@pytest.mark.parametrize("compare", [lambda r: r == 0, lambda r: r != 0, lambda r: r in (0, 1)])
def test_a_branch_on_the_value_of_a_register_is_refused(compare):
    with pytest.raises(TypeError, match="has no value while the kernel is built"):
        simulate(lambda: compare(nisa.register_alloc(0)))()
