"""Creating tensors. Source: nki/api/nki/language/__init__.py."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..core import current_core, fail
from ..dtypes import kernel_dtype, uint8
from ..enums import HBM_REGIONS, ON_CHIP_REGIONS, MemoryRegion
from ..integers import is_integer
from ..isa.vector import memset
from ..memory import allocate
from ..tensor import NkiTensor, require_tensor
from .composite import fill


def ndarray(
    shape: Sequence[int],
    dtype: Any,
    buffer: MemoryRegion = MemoryRegion.sbuf,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """An uninitialised tensor.

    Args:
        address: (partition, byte offset within each partition), on chip. Tensors at overlapping addresses share memory.

    Raises:
        CapacityError: more is live than the memory holds.
    """
    core = current_core()
    kind = kernel_dtype(dtype)
    if type(buffer) is not MemoryRegion:
        fail("buffer", f"buffer is {buffer!r}, expected nl.sbuf, nl.psum, nl.hbm, nl.private_hbm or nl.shared_hbm")
    sizes = _shape(shape, buffer)
    if buffer in ON_CHIP_REGIONS and sizes[0] > 128 and core.checking:
        fail(
            "partition-limit",
            f"a tensor of shape {list(sizes)} in {buffer.value} has {sizes[0]} partitions, at most 128",
        )
    label = name or f"tensor{next(core.names)}"
    return NkiTensor(sizes, kind, allocate(core, sizes, kind, buffer, label, address))


def _shape(shape: Any, buffer: MemoryRegion) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else ()
    if not sizes:
        fail("tensor-shape", f"shape is {shape!r}, expected a tuple of positive integers")
    for size in sizes:
        if not is_integer(size) or size < 1:
            fail("tensor-shape", f"shape is {shape!r}, expected positive integers")
    if len(sizes) == 1 and buffer in ON_CHIP_REGIONS:
        if sizes != (1,):
            fail("tensor-shape", f"shape is {list(sizes)}; on chip a tensor has a partition and a free dimension")
        sizes = (1, 1)
    return tuple(map(int, sizes))


def full(
    shape: Sequence[int], fill_value: float, dtype: Any, buffer: MemoryRegion = MemoryRegion.sbuf, name: str = ""
) -> NkiTensor:
    """A tensor filled with `fill_value`."""
    result = ndarray(shape, dtype, buffer, name)
    if result.dtype.is_integer:
        fill_value = int(fill_value)
    if buffer in HBM_REGIONS:
        values = torch.tensor(float(fill_value)).expand(result.shape)
        fill(dst=result, values=values)
    else:
        memset(dst=result, value=fill_value)
    return result


def zeros(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """A tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """An uninitialised tensor with the shape of `x`, and its dtype and buffer unless given."""
    require_tensor(x, "x")
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """Zeros with the shape of `x`, and its dtype unless given; in SBUF unless `buffer` is given."""
    require_tensor(x, "x")
    return full(x.shape, 0, dtype or x.dtype, buffer or MemoryRegion.sbuf, name)


def rand(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """Uniform random values in [0, 1), from the core's generator rather than the device's bits."""
    result = ndarray(shape, dtype, buffer, name)
    fill(dst=result, values=torch.rand(result.shape, generator=current_core().generator))
    return result


def random_seed(seed: NkiTensor) -> None:
    """Seed `rand` with the 32-bit value of a [1, 1] tensor."""
    require_tensor(seed, "seed")
    if seed.size != 1:
        fail("register", f"seed has shape {list(seed.shape)}, expected [1, 1]")
    current_core().generator.manual_seed(int(seed.raw.reshape(-1)[0].item()))


def shared_constant(constant: Any) -> NkiTensor:
    """A tensor in shared HBM that holds a NumPy array, or the array of a .npy file."""
    from ..arguments import to_tensor

    array = np.load(constant) if isinstance(constant, (str, os.PathLike)) else np.asarray(constant)
    return to_tensor(current_core(), array.copy(), "constant", MemoryRegion.shared_hbm, "constant")


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """The n x n identity matrix in SBUF; written to `dst` when given."""
    result = ndarray((n, n), dtype) if dst is None else dst
    require_tensor(result, "dst")
    if math.prod(result.shape) != n * n or result.shape[0] != n:
        fail("same-elements", f"dst is {list(result.shape)}, expected [{n}, {n}]")
    fill(dst=result, values=torch.eye(n))
    return result
