"""Checks that operations share: each raises one ArgumentError naming the argument, what came and what was expected."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError

# Steps in which NumPy looks for an element that two tensors share.
OVERLAP_WORK = 100_000


def check_tensor(
    name: str,
    value: object,
    shape: str,
    dtypes: Collection[torch.dtype] | None = None,
    **sizes: int | None,
) -> tuple[int, ...]:
    """Check that `value` is a dense tensor of a shape, and return it.

    Args:
        shape: dim names or numbers, e.g. "num_blocks, kv_heads, block_size, D" or "1, 1".
        dtypes: those allowed; None for any.
        sizes: by dim name, what a dim must be; other named dims may be any positive size.
    """
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(name, type(value).__name__, "a torch tensor")
    if value.is_nested:
        raise ArgumentTypeError(name, "a nested tensor", f"a dense one, [{shape}]")
    if dtypes is not None and value.dtype not in dtypes:
        raise ArgumentTypeError(name, value.dtype, " or ".join(str(dtype) for dtype in dtypes))
    if value.layout != torch.strided:
        raise ArgumentTypeError(name, value.layout, "a dense tensor, torch.strided")
    dims = [dim.strip() for dim in shape.split(",")]
    wanted = [int(dim) if dim.isdigit() else sizes.get(dim) for dim in dims]
    if len(dims) != value.ndim or any(
        size < 1 if want is None else size != want for size, want in zip(value.shape, wanted, strict=True)
    ):
        spelled = ", ".join(
            dim if want is None or dim.isdigit() else f"{dim}={want}" for dim, want in zip(dims, wanted, strict=True)
        )
        empty = "no dim of size 0" if 0 in value.shape else ""
        raise ArgumentError(name, f"shape {list(value.shape)}", f"[{spelled}]", empty)
    return tuple(value.shape)


def check_device(reference: Tensor, reference_name: str, **tensors: Tensor | None) -> None:
    """Check that all tensors lie on the reference's device, and that it holds values."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != reference.device:
            raise ArgumentError(
                name, f"a tensor on {tensor.device}", f"one on {reference.device}, where {reference_name} is"
            )
    if reference.device.type == "meta":
        raise ArgumentError(reference_name, "a tensor on meta", "one on a device that holds its values")


def check_apart(name: str, written: Tensor, **read: Tensor | None) -> None:
    """Check that each element of a tensor to write to has memory of its own, and none that is also read.

    Tensors whose memory is too entangled to tell count as sharing it; rows, columns and steps of a buffer are not.
    """
    reach = 0
    for stride, size in sorted(zip(written.stride(), written.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                raise ArgumentError(name, "a tensor whose elements share memory", "one with memory for every element")
            reach += stride * (size - 1)
    for other, tensor in read.items():
        if tensor is not None and _share_memory(written, tensor):
            raise ArgumentError(name, f"a tensor that shares memory with {other}", "one with memory of its own")


class _Elements:
    """Where a tensor's elements lie, as NumPy takes it; the memory may be another device's and is not touched."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one.device.type == "meta":
        return False
    try:
        return np.shares_memory(
            np.asarray(_Elements(one)),
            np.asarray(_Elements(other)),
            max_work=OVERLAP_WORK,  # type: ignore[arg-type]
        )
    except RuntimeError:  # NumPy's TooHardError
        return True


def check_int(name: str, value: object, *, minimum: int) -> int:
    """Check for a Python integer of at least `minimum` and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(name, repr(value), "an integer")
    if value < minimum:
        raise ArgumentError(name, value, f"at least {minimum}")
    return value


def check_bool(name: str, value: object) -> bool:
    """Check for a Python bool and return it."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(name, repr(value), "True or False")
    return value


def check_one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Check that `value` is one of `allowed`."""
    if not any(type(value) is type(known) and value == known for known in allowed):
        raise ArgumentError(name, repr(value), " or ".join(map(repr, allowed)))


def check_finite(name: str, value: object) -> float:
    """Check for a Python number that is finite in float32, and return it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(name, repr(value), "a number")
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise ArgumentError(name, value, "a number that is finite in float32")
    return float(value)


def check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    """Check that `value` is a multiple of `of`."""
    if value % of:
        raise ArgumentError(name, value, f"a multiple of {of_name}={of}")


def check_repeated_scalar(name: str, value: Tensor) -> None:
    """Check that every entry is the same finite number."""
    flat = value.flatten().to(torch.float64)
    if not bool(flat[0].isfinite()):
        raise ArgumentError(name, float(flat[0]), "a finite number")
    different = (flat != flat[0]).nonzero()
    if len(different):
        index = int(different[0])
        raise ArgumentError(name, f"{float(flat[0])} at 0 and {float(flat[index])} at {index}", "one repeated value")
