"""Registers and dynamic loops: nki.isa `register_*`, nki.language `dynamic_range`, `fori_loop`, `while_loop`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from .dtypes import round_to


def register_load(tensor: ArrayLike, dtype: str) -> float:
    """The value a register holds after a load of the tensor's one element."""
    values = np.asarray(tensor, np.float64).reshape(-1)
    assert values.size == 1
    return float(values[0]) if dtype.startswith(("float", "bfloat", "tfloat")) else int(values[0])


def register_store(value: float, dtype: str) -> float:
    """The tensor element after a store."""
    return float(round_to(value, dtype))


def fori_loop(lower: int, upper: int, body: Callable[[int], None], step: int = 1) -> None:
    """body(i) for i in range(lower, upper, step)."""
    for i in range(lower, upper, step):
        body(i)


def while_loop(condition: int, body: Callable[[int], int]) -> None:
    """body(condition) until it returns 0; not once when it starts at 0."""
    while condition != 0:
        condition = body(condition)
