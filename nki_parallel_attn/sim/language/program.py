"""Which program instance runs, and scheduling hints. Source: nki/api/nki/language/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

from ..core import current_core, fail
from ..integers import integers


def program_id(axis: int = 0) -> int:
    """Index of the program instance along `axis` of the launch grid; 0 without a grid."""
    core = current_core()
    if axis != 0:
        fail("lnc", f"axis {axis} of a launch grid that has one axis")
    return core.program_id


def num_programs(axes: int | Sequence[int] = 0) -> int:
    """Number of program instances along `axes`; 1 without a grid."""
    grid = current_core().grid or (1,)
    wanted = integers(axes if isinstance(axes, Sequence) else (axes,), "axes")
    if any(not 0 <= axis < len(grid) for axis in wanted):
        fail("lnc", f"axes {axes} of the launch grid {grid}")
    return math.prod(grid[axis] for axis in wanted)


def program_ndim() -> int:
    """Axes of the launch grid: 0 when the kernel was launched without one."""
    return len(current_core().grid)


class no_reorder:
    """`with nl.no_reorder():` keeps program order, which the simulator always does. Dynamic loops cannot be inside."""

    def __enter__(self) -> None:
        current_core().no_reorder_depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_core().no_reorder_depth -= 1
