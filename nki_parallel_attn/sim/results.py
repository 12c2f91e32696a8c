"""What a kernel returns: the same tensors on every core of a rank, in shared HBM and written in full."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .core import Rank
from .enums import MemoryRegion
from .location import show
from .memory import Storage
from .rules import RULES
from .tensor import NkiTensor


def same_view(one: NkiTensor, other: NkiTensor) -> bool:
    """Whether two tensors over the same storage are the same elements in the same order."""
    return (one.shape, one.strides, one.offset, one.dtype, one.indirection) == (
        other.shape, other.strides, other.offset, other.dtype, other.indirection,
    )  # fmt: skip


def check_results(rank: Rank, results: Sequence[Any], kernel: Callable[..., Any]) -> None:
    """Check what the cores of a rank return, by core.

    The kernel has ended by now, so an error points at the line that allocated the tensor, or at the kernel.

    Raises:
        NkiValidationError: a tensor is not in shared HBM (and no input), or took part in a collective; cores return
            different things.
        UninitializedReadError: an element of a tensor was never written.
    """
    _check_result(results[0], kernel)
    for core, result in enumerate(results[1:], 1):
        difference = _difference(results[0], result, "the result")
        if difference:
            _fail(
                "kernel-output",
                None,
                kernel,
                f"the cores of rank {rank.index} return different results: {difference[0]} on core 0, {difference[1]} "
                f"on core {core}; every core returns the same tensors",
            )


def _fail(rule: str, storage: Storage | None, kernel: Callable[..., Any], message: str) -> NoReturn:
    where = storage.location if storage is not None else None
    code = getattr(inspect.unwrap(kernel), "__code__", None)
    if where is None and code is not None:
        where = code.co_filename, code.co_firstlineno
    raise RULES[rule].error(message, rule=rule, location=show(where))


def _check_result(value: Any, kernel: Callable[..., Any]) -> None:
    if isinstance(value, NkiTensor):
        storage = value.storage
        if storage.role == "input":
            return
        if storage.communicated:
            _fail(
                "collective-kernel-io",
                storage,
                kernel,
                f"{value.name}, allocated here, is a result of the kernel and took part in a collective; copy it to "
                "another tensor",
            )
        if storage.region is not MemoryRegion.shared_hbm:
            _fail(
                "kernel-output",
                storage,
                kernel,
                f"the result {value.name} is in {storage.region.value}; allocate outputs with buffer=nl.shared_hbm",
            )
        where = value.unwritten()
        if where is not None:
            _fail(
                "uninitialised-output",
                storage,
                kernel,
                f"element {list(where)} of output {value.name} {list(value.shape)}, allocated here, was never written",
            )
        storage.role = "output"
    elif isinstance(value, (tuple, list)):
        for item in value:
            _check_result(item, kernel)
    elif isinstance(value, dict):
        for item in value.values():
            _check_result(item, kernel)


def _difference(one: Any, other: Any, where: str) -> tuple[str, str] | None:
    """How two cores' results first differ, as said of each; None when they are the same."""
    if isinstance(one, NkiTensor) and isinstance(other, NkiTensor):
        if one.storage is other.storage and same_view(one, other):
            return None
        return f"{where} is {_describe(one)}", _describe(other)
    if type(one) is not type(other):
        return f"{where} is {_describe(one)}", _describe(other)
    if isinstance(one, (tuple, list)):
        if len(one) != len(other):
            return f"{where} has {len(one)} items", str(len(other))
        pairs = ((f"{where}[{place}]", *items) for place, items in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{where} has keys {list(one)}", str(list(other))
        pairs = ((f"{where}[{key!r}]", one[key], other[key]) for key in one)
    else:
        plain = isinstance(one, (int, float, str))
        return (f"{where} is {one!r}", repr(other)) if plain and repr(one) != repr(other) else None
    return next(filter(None, (_difference(a, b, name) for name, a, b in pairs)), None)


def _describe(value: Any) -> str:
    if isinstance(value, NkiTensor):
        return f"{value.name} {value.get_pattern()} at {value.offset} in {value.buffer.value}"
    return repr(value) if value is None or isinstance(value, (int, float, str)) else type(value).__name__
