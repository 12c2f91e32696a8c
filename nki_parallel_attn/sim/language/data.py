"""Moving and rearranging tiles. Source: nki/api/nki/language/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core import current_core, fail
from ..dtypes import float32
from ..enums import HBM_REGIONS, MemoryRegion
from ..integers import integer, integers
from ..isa.dma import dma_copy, dma_transpose
from ..isa.tensor import nc_matmul, nc_transpose
from ..isa.vector import memset, tensor_copy
from ..tensor import NkiTensor, require_tensor
from .composite import composite, gather
from .creation import ndarray


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor."""
    require_tensor(src, "src")
    result = ndarray(src.shape, dtype or src.dtype)
    dma_copy(dst=result, src=src)
    return result


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write an SBUF tile to an HBM tensor."""
    dma_copy(dst=dst, src=value)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the transpose of a 2-D HBM tensor."""
    require_tensor(src, "src")
    if len(src.shape) != 2:
        fail("view", f"load_transpose2d takes a 2-D tensor, got {list(src.shape)}")
    result = ndarray(src.shape[::-1], src.dtype)
    dma_transpose(dst=result, src=src)
    return result if dtype in (None, src.dtype) else copy_tile(result, dtype)


def store_item(target: NkiTensor, value: Any) -> None:
    """`tensor[key] = value`: a copy of a tensor, or a constant on chip."""
    if not isinstance(value, NkiTensor):
        memset(dst=target, value=value)
    elif target.buffer in HBM_REGIONS or value.buffer in HBM_REGIONS:
        dma_copy(dst=target, src=value)
    else:
        tensor_copy(dst=target, src=value)


def copy_tile(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A copy of a tile in SBUF."""
    require_tensor(x, "x")
    result = ndarray(x.shape, dtype or x.dtype)
    tensor_copy(dst=result, src=x)
    return result


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """The transpose of a 2-D tile, in PSUM; as another dtype, in SBUF."""
    require_tensor(x, "x")
    result = ndarray((x.size // x.shape[0], x.shape[0]), x.dtype, MemoryRegion.psum)
    nc_transpose(dst=result, data=x)
    return result if dtype in (None, x.dtype) else copy_tile(result, dtype)


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x @ y, or x.T @ y when `transpose_x`, as float32 in PSUM."""
    require_tensor(x, "x")
    require_tensor(y, "y")
    stationary = x if transpose_x else copy_tile(transpose(x))
    result = ndarray((stationary.size // stationary.shape[0], y.size // y.shape[0]), float32, MemoryRegion.psum)
    nc_matmul(dst=result, stationary=stationary, moving=y)
    return result


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """A view with a dimension of size 1 at `axis`."""
    require_tensor(x, "x")
    axis = integer(axis, "axis")
    return x.expand_dim(axis if axis >= 0 else axis + len(x.shape) + 1)


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: Any = None) -> NkiTensor:
    """A tile of `shape`, of the same rank, repeating dimensions of size 1; `x` itself when nothing changes."""
    require_tensor(x, "x")
    sizes = integers(shape, "shape")
    if len(sizes) != len(x.shape) or any(a not in (1, b) for a, b in zip(x.shape, sizes, strict=True)):
        fail("view", f"{list(x.shape)} cannot be broadcast to {list(sizes)}")
    if sizes == x.shape and dtype in (None, x.dtype):
        return x
    result = ndarray(sizes, dtype or x.dtype)
    composite(dst=result, inputs=[x], function=lambda values: values.expand(sizes))
    return result


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """Elements of each partition of `data`, its free dimensions flattened, at `indices`."""
    require_tensor(data, "data")
    require_tensor(indices, "indices")
    result = ndarray(indices.shape, dtype or data.dtype)
    gather(dst=result, data=data, indices=indices)
    return result


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print the tensor's values to standard output."""
    core = current_core()
    where = f" (rank {core.rank.index}, core {core.program_id})" if core.world_size * core.rank.lnc > 1 else ""
    print(f"{print_prefix}{where} {tensor!r}")
