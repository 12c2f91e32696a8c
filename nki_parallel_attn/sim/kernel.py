"""nki.jit: marks a Python function as a kernel. Source: nki/api/nki.rst; nki/get-started/about/lnc.rst."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .core import fail, running_core
from .integers import is_integer


class Kernel:
    """A kernel: call it to simulate it, `kernel[lnc]` to launch it on several cores.

    Attributes:
        function: the Python function.
        grid: () or (cores,).
        schedule: extra dependency edges, which change no result.
    """

    def __init__(self, function: Callable[..., Any], grid: tuple[int, ...] = ()) -> None:
        self.function = function
        self.grid = grid
        self.schedule: list[tuple[str, Any]] = []
        functools.update_wrapper(self, function)

    def __getitem__(self, cores: int | tuple[int, ...]) -> Kernel:
        grid = cores if isinstance(cores, tuple) else (cores,)
        if len(grid) != 1 or not is_integer(grid[0]) or grid[0] < 1:
            fail("lnc", f"the launch grid is {cores!r}, expected one positive number of cores")
        launched = Kernel(self.function, (int(grid[0]),))
        launched.schedule = self.schedule
        return launched

    def with_schedule(self, edges: Sequence[tuple[str, Any]]) -> Kernel:
        """Add (consumer, producer or producers) edges between named instructions."""
        scheduled = Kernel(self.function, self.grid)
        scheduled.schedule = [*self.schedule, *edges]
        return scheduled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a kernel, call the function inline; outside, simulate."""
        if running_core() is not None:
            return self.function(*args, **kwargs)
        from .simulation import simulate

        return simulate(self)(*args, **kwargs)


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a kernel, with or without arguments; `mode` is ignored, as documented.

    Raises:
        NkiValidationError: platform_target is given; use the environment variable or simulate(target=).
    """
    if "platform_target" in options:
        fail("jit-option", "platform_target was removed: set NEURON_PLATFORM_TARGET_OVERRIDE, or simulate(target=)")
    return Kernel if fn is None else Kernel(fn)
