"""Capacity by liveness, uninitialised reads by element, and tensors at manual addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nki_parallel_attn.sim import CapacityError, UninitializedReadError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl


def test_psum_holds_eight_banks_and_the_error_lists_them():
    def kernel(banks):
        tiles = [nl.zeros((128, 512), nl.float32, nl.psum, name=f"bank{i}") for i in range(banks)]
        sink = nl.ndarray((128, 512), nl.float32)
        for tile in tiles:
            nisa.tensor_copy(sink, tile)

    simulate(kernel)(8)
    with pytest.raises(CapacityError) as caught:
        simulate(kernel)(9)
    assert caught.value.rule == "psum-capacity"
    assert all(f"bank{i} [128, 512] float32 at {__file__}" in str(caught.value) for i in range(9))
    simulate(kernel, checks=False)(9)


def test_what_python_keeps_but_the_kernel_no_longer_uses_does_not_count():
    def kernel():
        sink = nl.ndarray((128, 512), nl.float32)
        for _ in range(3):  # the name still holds the last iteration's eight banks while the next eight are made
            tiles = [nl.zeros((128, 512), nl.float32, nl.psum) for _ in range(8)]
            for tile in tiles:
                nisa.tensor_copy(sink, tile)

    simulate(kernel)()


@pytest.mark.parametrize(("target", "kib"), [("trn2", 224), ("trn3", 256)])
def test_sbuf_capacity_of_the_target(target, kib):
    def kernel(size):
        nl.ndarray((128, size), nl.uint8)
        assert nl.tile_size.sbuf_fmax_bytes == kib * 1024

    simulate(kernel, target=target)(kib * 1024)
    with pytest.raises(CapacityError):
        simulate(kernel, target=target)(kib * 1024 + 1)


def test_uninitialised_reads_name_the_element():
    def kernel():
        tile = nl.ndarray((4, 8), nl.float32, name="halves")
        nisa.memset(tile[:, 0:5], 0.0)
        nisa.tensor_copy(nl.ndarray((4, 5), nl.float32), tile[:, 0:5])
        nisa.tensor_copy(nl.ndarray((4, 8), nl.float32), tile)

    with pytest.raises(UninitializedReadError, match=r"element \[0, 5\] of halves") as caught:
        simulate(kernel)()
    line = kernel.__code__.co_firstlineno + 4
    assert caught.value.location == f"{__file__}:{line}"
    simulate(kernel, checks=False)()


def test_written_flags_follow_reinterpreted_bytes():
    def kernel():
        tile = nl.ndarray((2, 4), nl.float32)
        nisa.memset(tile.view(nl.uint16)[:, 0:7], 0)
        nisa.tensor_copy(nl.ndarray((2, 3), nl.float32), tile[:, 0:3])
        nisa.tensor_copy(nl.ndarray((2, 1), nl.float32), tile[:, 3:4])

    with pytest.raises(UninitializedReadError):
        simulate(kernel)()


def test_unwritten_memory_is_poison_without_checks():
    def kernel(dtype):
        tile = nl.ndarray((2, 4), dtype)
        out = nl.ndarray((2, 4), nl.float32, nl.shared_hbm)
        nl.store(out, tile)
        return out

    assert bool(simulate(kernel, checks=False)(nl.bfloat16).isnan().all())
    assert bool((simulate(kernel, checks=False)(nl.int16) == 4).all())


def test_manual_addresses_share_bytes():
    def kernel(x):
        first = nl.ndarray((4, 8), nl.float32, nl.sbuf, address=(0, 64))
        nisa.dma_copy(first, x)
        shifted = nl.ndarray((4, 6), nl.float32, nl.sbuf, address=(0, 72))
        raw = nl.ndarray((2, 8), nl.int32, nl.sbuf, address=(2, 64))
        assert shifted.address == (0, 72)
        out = nl.ndarray((4, 6), nl.float32, nl.shared_hbm)
        bits = nl.ndarray((2, 8), nl.int32, nl.shared_hbm)
        nl.store(out, shifted)
        nl.store(bits, raw)
        return out, bits

    values = torch.randn(4, 8)
    out, bits = simulate(kernel)(values)
    assert torch.equal(out, values[:, 2:]) and torch.equal(bits, values[2:].view(torch.int32))


def test_manual_addresses_start_unwritten():
    def kernel():
        tile = nl.ndarray((4, 8), nl.float32, nl.sbuf, address=(0, 0))
        nisa.memset(tile[:, 0:4], 1.0)
        nisa.tensor_copy(nl.ndarray((4, 8), nl.float32), tile)

    with pytest.raises(UninitializedReadError, match=r"\[0, 4\]"):
        simulate(kernel)()


def test_outputs_must_be_written_in_full():
    def kernel(x):
        out = nl.ndarray((4, 8), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out[0:3], x[0:3])
        return out

    with pytest.raises(UninitializedReadError) as caught:
        simulate(kernel)(np.ones((4, 8), np.float32))
    assert caught.value.rule == "uninitialised-output"


@pytest.mark.parametrize("shift", [-64, -12, -4, 0, 4, 12, 32, 256])
def test_an_instruction_reads_all_of_a_tensor_that_its_result_lies_across(shift):
    x = torch.rand(64, 64) + 1

    def kernel(x):
        data = nl.ndarray((64, 64), nl.float32, nl.sbuf, address=(0, 1024))
        result = nl.ndarray((64, 64), nl.float32, nl.sbuf, address=(0, 1024 + shift))
        nisa.dma_copy(dst=data, src=x)
        nisa.reciprocal(dst=result, data=data)
        out = nl.ndarray((64, 64), nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=result)
        return out

    torch.testing.assert_close(simulate(kernel)(x), 1 / x)
