"""What remains of a DMA transfer when oob_mode.skip leaves out rows whose run-time index is out of bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .errors import UnsupportedInstructionError
from .tensor import GatheredTensor, NkiTensor


def skips(tensor: NkiTensor) -> bool:
    """Whether rows of the access were out of bounds."""
    return isinstance(tensor, GatheredTensor) and tensor.kept is not None


def asked_shape(tensor: NkiTensor) -> tuple[int, ...]:
    """Shape of the access before rows were skipped."""
    return tensor.asked if isinstance(tensor, GatheredTensor) else tensor.shape


def asked_size(tensor: NkiTensor) -> int:
    """Elements of the access before rows were skipped."""
    return math.prod(asked_shape(tensor))


def keep_in_bounds(tensors: Sequence[NkiTensor]) -> list[NkiTensor]:
    """Of tensors with equally many elements, the rows that none of them skips; the tensors themselves if none does.

    Rows are those of the skipping tensors; the others are divided into as many, in row-major order.
    """
    skipping = [tensor for tensor in tensors if isinstance(tensor, GatheredTensor) and tensor.kept is not None]
    if not skipping:
        return list(tensors)
    count = skipping[0].asked[0]
    kept = torch.ones(count, dtype=torch.bool)
    for tensor in skipping:
        if tensor.asked[0] != count:
            raise UnsupportedInstructionError("oob_mode.skip on two sides with rows of different sizes")
        assert tensor.kept is not None
        mine = torch.zeros(count, dtype=torch.bool)
        mine[tensor.kept] = True
        kept &= mine
    return [_rows(tensor, count, kept) for tensor in tensors]


def _rows(tensor: NkiTensor, count: int, kept: torch.Tensor) -> NkiTensor:
    """The kept ones of `count` rows."""
    shape = asked_shape(tensor)
    if isinstance(tensor, GatheredTensor):
        if shape[0] != count:
            raise UnsupportedInstructionError("oob_mode.skip with two indirect sides whose rows differ in size")
        left = kept if tensor.kept is None else kept[tensor.kept]
        index = tensor.index[left]
        return tensor.part((index.numel(), *shape[1:]), index)
    chosen = kept.nonzero().reshape(-1)
    if shape[0] == count and tensor.storage.arena is None:
        return GatheredTensor(
            tensor, (chosen.numel(), *shape[1:]), shape, tensor.strides, tensor.offset, chosen, None, tensor
        )
    addresses = torch.tensor(tensor.offset)
    for size, stride in zip(shape, tensor.strides, strict=True):
        addresses = addresses[..., None] + torch.arange(size) * stride
    addresses = addresses.reshape(count, -1)[chosen]
    storage = tensor.storage
    total = storage.elements * storage.dtype.itemsize // tensor.dtype.itemsize
    return GatheredTensor(tensor, tuple(addresses.shape), (total,), (1,), 0, addresses.reshape(-1), None, tensor)
