"""PSUM as an accumulator: where matmuls have written, and whether the next one adds to what is there.

Before trn3 a matmul adds only to what a matmul wrote, so PSUM remembers that per byte; any other instruction that
writes there ends it. Source: nki/api/nki/isa/__init__.py, nc_matmul, "Accumulation mode".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .dtypes import FLOAT32
from .enums import nc_version
from .tensor import Flags, GatheredTensor, NkiTensor

if TYPE_CHECKING:
    from .instruction import Call

Added = bool | torch.Tensor  # everywhere, nowhere, or at the True elements of a mask


def note_matmul(dst: NkiTensor) -> None:
    """Note that a matmul wrote dst."""
    storage = dst.storage
    if storage.arena is None:
        if storage.by_matmul is True:
            return
        if dst.covers_storage:
            storage.by_matmul = True
            return
    _set(dst, True)


def note_other_write(dst: NkiTensor) -> None:
    """Note that an instruction other than a matmul wrote dst."""
    storage = dst.storage
    if storage.arena is None and (storage.by_matmul is False or dst.covers_storage):
        storage.by_matmul = False
    else:
        _set(dst, False)


def _set(dst: NkiTensor, value: bool) -> None:
    storage = dst.storage
    if storage.arena is not None:
        flags = storage.arena.by_matmul
    elif isinstance(storage.by_matmul, bool):
        size = storage.elements * storage.dtype.itemsize
        flags = storage.by_matmul = np.full(size, storage.by_matmul, dtype=np.bool_)
    else:
        flags = storage.by_matmul
    if isinstance(dst, GatheredTensor):
        grid, index = dst.flag_grid(flags, 1)
        grid[index] = value
    else:
        dst.flag_view(flags, 1)[...] = value


def _by_matmul(dst: NkiTensor) -> bool | Flags:
    """Which elements of dst a matmul wrote last."""
    storage = dst.storage
    state = storage.by_matmul if storage.arena is None else storage.arena.by_matmul
    return state if isinstance(state, bool) else _per_element(dst, dst.flag_view(state, 1))


def _per_element(dst: NkiTensor, flags: Flags) -> bool | Flags:
    """Flags of one or more bytes per element as one per element, or as a single bool when all are equal."""
    if flags.all():
        return True
    if not flags.any():
        return False
    return np.ascontiguousarray(flags if flags.ndim == len(dst.shape) else flags[..., 0])


def accumulates(call: Call, dst: NkiTensor, accumulate: bool | None) -> Added:
    """Whether a matmul into dst adds to it; None adds exactly where something has been written before.

    Raises:
        NkiValidationError: it would add to what nothing, or before trn3 another instruction, has written.
    """
    if accumulate is not None and (not accumulate or not call.core.checking):
        if accumulate:
            call.reads.append(dst)
        return bool(accumulate)
    storage = dst.storage
    if storage.full:
        added: bool | Flags = True
    else:
        flags = storage.flags(dst.dtype.itemsize)
        added = _per_element(dst, dst.flag_view(flags, storage.grain))
    if added is False and accumulate is None:
        return False
    if accumulate:
        if added is not True:
            call.require(
                False, "psum-accumulate", f"accumulate=True onto {dst.name}, parts of which nothing has initialised"
            )
        added = True
    call.reads.append(dst)
    if call.core.checking and not call.core.target.at_least(nc_version.gen4):
        _require_matmul(call, dst, accumulate, added)
    return added if isinstance(added, bool) else torch.from_numpy(added)


def _require_matmul(call: Call, dst: NkiTensor, accumulate: bool | None, added: bool | Flags) -> None:
    """Before trn3: demand that what is added to was written by matmuls."""
    mine = _by_matmul(dst)
    if mine is True:
        return
    foreign = np.broadcast_to(np.logical_and(added, np.logical_not(mine)), dst.shape)
    if not foreign.any():
        return
    # Zeros from memset are the documented idiom for a fresh accumulator: adding to them is overwriting them.
    if accumulate or (call.core.computes and bool((dst.f32()[torch.from_numpy(foreign.copy())] != 0).any())):
        call.fail("psum-accumulate", f"{dst.name} was initialised by another instruction than a matmul")


def put_product(dst: NkiTensor, left: torch.Tensor, right: torch.Tensor, added: Added) -> None:
    """dst = left.T @ right (+ dst), in float32, rounded to dst's dtype at this write."""
    if dst.format is FLOAT32 and len(dst.shape) == 2 and type(dst) is NkiTensor and isinstance(added, bool):
        target = dst.target()
        if added:
            target.addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=target)
        return
    put_sum(dst, torch.mm(left.t(), right), added)


def put_sum(dst: NkiTensor, product: torch.Tensor, added: Added) -> None:
    """dst = product (+ dst), in float32, rounded to dst's dtype at this write."""
    product = product.reshape(dst.shape)
    if added is not False:
        current = dst.f32()
        product = product + (current if added is True else torch.where(added, current, 0.0))
    dst.put(product)
