"""How a corpus kernel is declared: the function, its inputs, where it runs, and what must happen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_parallel_attn.sim.errors import NkiParallelAttnError, NkiValidationError

MARKER = "# <- breaks"
Input = Callable[[int], np.ndarray]  # rank -> array
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One kernel and where it runs.

    Attributes:
        rule: the rule that it breaks; None when the error carries no rule, or for a clean kernel.
        error: class of the error; None for a clean kernel.
        expected: NumPy result of a clean kernel for all ranks' inputs and one rank: arrays like the kernel's results.
    """

    kernel: Kernel
    inputs: tuple[Input, ...]
    rule: str | None = None
    error: type[NkiParallelAttnError] | None = None
    expected: Callable[..., Any] | None = None
    world_size: int = 1
    lnc: int = 1
    target: str = "trn2"

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def arguments(self, rank: int) -> tuple[np.ndarray, ...]:
        """Fresh inputs of one rank."""
        return tuple(make(rank) for make in self.inputs)

    def breaking_line(self) -> int | None:
        """Line of the file that carries the marker; None when it has none (the fault shows after it returned)."""
        lines, first = inspect.getsourcelines(self.kernel)
        marked = [first + i for i, line in enumerate(lines) if MARKER in line]
        assert len(marked) <= 1, f"{self.name} marks several lines"
        return marked[0] if marked else None


def broken(
    table: list[Case],
    rule: str | None,
    *inputs: Input,
    error: type[NkiParallelAttnError] = NkiValidationError,
    world_size: int = 1,
    lnc: int = 1,
    target: str = "trn2",
) -> Callable[[Kernel], Kernel]:
    """Add the decorated kernel to the table of kernels that must raise `error` with `rule` at the marked line."""

    def add(kernel: Kernel) -> Kernel:
        table.append(Case(kernel, inputs, rule, error, None, world_size, lnc, target))
        return kernel

    return add


def clean(
    table: list[Case],
    expected: Callable[..., Any],
    *inputs: Input,
    world_size: int = 1,
    lnc: int = 1,
    target: str = "trn2",
) -> Callable[[Kernel], Kernel]:
    """Add the decorated kernel to the table of kernels that must run and give `expected`.

    `expected(*inputs)` for one rank; with several ranks `expected(rank, [inputs of rank 0, inputs of rank 1, ...])`.
    """

    def add(kernel: Kernel) -> Kernel:
        table.append(Case(kernel, inputs, None, None, expected, world_size, lnc, target))
        return kernel

    return add


def expected_of(case: Case, rank: int) -> Any:
    """The NumPy result of a clean case on one rank."""
    assert case.expected is not None
    if case.world_size == 1:
        return case.expected(*case.arguments(rank))
    return case.expected(rank, [case.arguments(r) for r in range(case.world_size)])


def f32(*shape: int) -> Input:
    """Standard normal float32 values, other ones on every rank."""
    return lambda rank: np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


def rows_by_rank(width: int) -> Input:
    """A float32 array of rank + 1 rows: lets a kernel branch on its rank while it is traced."""
    return lambda rank: np.zeros((rank + 1, width), np.float32)


def array(values: Sequence[Any] | np.ndarray, dtype: str) -> Input:
    """The same array on every rank."""
    return lambda rank: np.array(values, dtype)
