"""Arguments that share memory, of one rank or of several.

On the device every argument of every rank is a tensor of its own. Here arrays are used where they lie, or copied when
their layout asks for it, so a write to one of two that overlap may or may not be seen through the other. Both may be
read; a write is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .memory import Storage

Array = torch.Tensor | np.ndarray[Any, Any]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Steps in which NumPy looks for an element of two arrays; those that take more count as overlapping.
_MOST_WORK = 100_000


def same_memory(array: Array) -> tuple[object, ...]:
    """Equal for arrays that are one view of one memory."""
    if isinstance(array, torch.Tensor):
        return torch.Tensor, array.data_ptr(), tuple(array.shape), array.stride(), array.dtype
    return np.ndarray, array.__array_interface__["data"][0], array.shape, array.strides, array.dtype


@dataclass(frozen=True)
class PlacedArgument:
    """An argument, how messages call it, and the tensor memory that stands for it."""

    label: str
    array: Array
    storage: Storage


def note_overlaps(arguments: Iterable[PlacedArgument]) -> None:
    """Tell the storage of each argument that overlaps another which one that is."""
    spans = sorted((_Span(argument) for argument in arguments), key=lambda span: span.low)
    open_spans: list[_Span] = []
    for span in spans:
        open_spans = [other for other in open_spans if other.high > span.low]
        for other in open_spans:
            known = span.argument.storage.shares_with and other.argument.storage.shares_with
            if not known and span.overlaps(other):
                for one, two in ((span, other), (other, span)):
                    one.argument.storage.shares_with = one.argument.storage.shares_with or two.argument.label
        open_spans.append(span)


class _Span:
    """An argument's elements as a NumPy array, and the addresses between which they lie."""

    def __init__(self, argument: PlacedArgument) -> None:
        self.argument = argument
        array = argument.array
        if isinstance(array, torch.Tensor):
            array = array.detach().view(_BITS[array.element_size()]).numpy()
        self.elements = array
        reach = [(size - 1) * stride for size, stride in zip(self.elements.shape, self.elements.strides, strict=True)]
        start = self.elements.__array_interface__["data"][0]
        self.low = start + sum(step for step in reach if step < 0)
        self.high = start + sum(step for step in reach if step > 0) + self.elements.itemsize

    def overlaps(self, other: _Span) -> bool:
        try:
            return bool(np.shares_memory(self.elements, other.elements, max_work=_MOST_WORK))  # type: ignore[arg-type]
        except RuntimeError:  # TooHardError
            return True
