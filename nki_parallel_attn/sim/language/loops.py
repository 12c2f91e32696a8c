"""Loops and dynamic slices. Source: nki/api/nki/language/__init__.py; nki/deep-dives/nki-dynamic-loops.rst.

Static loops are Python's range. Dynamic loops run on the device, so their variable is a register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..core import LoopScope, current_core, fail
from ..indexing import DynamicSlice, is_dynamic
from ..integers import integer, integers, is_integer
from ..registers import VirtualRegister

Bound = int | VirtualRegister


def ds(start: Any, size: int) -> DynamicSlice:
    """`size` elements from `start`, which may be a register or a [1, 1] tensor."""
    return DynamicSlice(start if is_dynamic(start) else integer(start, "start"), integer(size, "size"))


def static_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Python's range: the loop is unrolled."""
    bounds = (start,) if stop is None else (start, stop, step)
    return range(*integers(bounds, "a bound of the loop"))


affine_range = sequential_range = static_range


def dynamic_range(start: Bound, stop: Bound | None = None, step: int = 1) -> Iterator[VirtualRegister]:
    """A loop on the device from start to stop (exclusive), which may be registers; yields a read-only register."""
    if stop is None:
        start, stop = 0, start
    return _registers(start, stop, step, frozen=True)


def fori_loop(lower: Bound, upper: Bound, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """Call body_fun(register) for each value from lower to upper (exclusive)."""
    for register in _registers(lower, upper, step, frozen=False):
        if body_fun(register) is not None:  # type: ignore[func-returns-value]
            fail("loop-body", "the body of fori_loop returns nothing")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """Call body_fun(register) while the condition is not 0; it returns the next condition register."""
    condition = init
    with _Loop():
        while condition.read() != 0:
            condition = body_fun(VirtualRegister(condition.read()))
            if not isinstance(condition, VirtualRegister):
                fail(
                    "loop-body", f"the body of while_loop returned {condition!r}, expected the next condition register"
                )


def _registers(start: Bound, stop: Bound, step: int, frozen: bool) -> Iterator[VirtualRegister]:
    if not is_integer(step) or step < 1:
        fail("loop-step", f"step is {step!r}, expected a positive integer")
    with _Loop():
        for value in range(_value(start), _value(stop), step):
            yield VirtualRegister(value, frozen)


def _value(bound: Bound) -> int:
    return bound.read_integer() if isinstance(bound, VirtualRegister) else integer(bound, "a bound of the loop")


class _Loop:
    """A dynamic loop while it runs: what is declared inside ends with it."""

    def __enter__(self) -> None:
        core = self._core = current_core()
        if core.no_reorder_depth and core.checking:
            fail("loop-no-reorder", "a dynamic loop inside a no_reorder block; put the block inside the loop")
        self._scope = core.loop = LoopScope(core.loop)

    def __exit__(self, *_: object) -> None:
        self._core.loop = self._scope.parent
        self._scope.ended = True
