"""Integers that kernels give: indices, sizes, strides, dimensions, ranks. Python's and NumPy's are taken.

A float is refused rather than truncated, a bool rather than read as 0 or 1, a register because it has no value yet.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NoReturn


def is_integer(value: object) -> bool:
    """Whether `value` is an integer known while the kernel is built."""
    if type(value) is int:
        return True
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def integer(value: Any, what: str) -> int:
    """`value` as an int.

    Raises:
        NkiValidationError: it is no integer; `what` names it.
    """
    if type(value) is int:
        return value
    if not is_integer(value):
        _refuse(f"{what} is {value!r}, expected an integer")
    return operator.index(value)


def integers(values: Iterable[Any], what: str) -> tuple[int, ...]:
    """`values` as ints.

    Raises:
        NkiValidationError: one of them is no integer; `what` names them.
    """
    if not isinstance(values, Iterable) or isinstance(values, str):
        _refuse(f"{what} is {values!r}, expected integers")
    return tuple(integer(value, f"{what}[{place}]") for place, value in enumerate(values))


def nested_integers(value: Any, what: str) -> Any:
    """`value`, an integer or lists or tuples of them to any depth, with ints; lists stay lists."""
    if is_integer(value) or not isinstance(value, Iterable) or isinstance(value, str):
        return integer(value, what)
    items = [nested_integers(item, f"{what}[{place}]") for place, item in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)


def _refuse(message: str) -> NoReturn:
    from .core import fail  # here, because it loads torch, which ReplicaGroup does without

    fail("integer", message)
