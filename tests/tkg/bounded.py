"""Numbers with what float arithmetic may have done to them: a float64 value and a radius, element by element.

The value follows the documented roundings; the radius is how far a computation that rounds at the same points, but sums
in another precision and order, can be from it: running error analysis (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.3). A rounding mostly makes a radius zero again; where the value lies so close to the middle of
two neighbours that it may fall to either, the radius becomes their distance. A sum of n products of either sign is
taken to be off by (4 sqrt(n) + 8) u times the root of the sum of their squares: its roundings are independent, each at
most u times a partial sum (Higham and Mary 2020, on random data).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bounded:
    value: Tensor
    radius: Tensor

    @staticmethod
    def exact(value: Tensor) -> Bounded:
        return Bounded(value.double(), torch.zeros_like(value, dtype=torch.float64))

    @property
    def largest(self) -> Tensor:
        """Of each element, in magnitude."""
        return self.value.abs() + self.radius

    def on_both(self, change: Callable[[Tensor], Tensor]) -> Bounded:
        """The same rearrangement of values and radii."""
        return Bounded(change(self.value), change(self.radius))

    def __getitem__(self, index: Any) -> Bounded:
        return self.on_both(lambda t: t[index])

    def widened(self, relative: float) -> Bounded:
        return Bounded(self.value, self.radius + relative * self.largest)

    def times(self, factor: Tensor | float) -> Bounded:
        factor = torch.as_tensor(factor, dtype=torch.float64)
        return Bounded(self.value * factor, self.radius * factor.abs())

    def plus(self, other: Tensor) -> Bounded:
        return Bounded(self.value + other.double(), self.radius)

    def through(self, *steps: Callable[[Tensor], Tensor]) -> Bounded:
        """A function that never decreases, such as a rounding; of several, any may have been taken, the first by us."""
        value = steps[0](self.value)
        ends = [step(self.value + sign * self.radius) for step in steps for sign in (-1, 0, 1)]
        return Bounded(value, torch.stack([(end - value).abs() for end in ends]).amax(0))

    def rounded(self, dtype: torch.dtype) -> Bounded:
        return self.through(lambda t: t.to(dtype).double())

    def matmul(self, weight: Tensor, unit: float) -> Bounded:
        """Times an exact matrix, summed with unit roundoff `unit`."""
        error = sum_error(len(weight), unit) * (self.largest.square() @ weight.square()).sqrt()
        return Bounded(self.value @ weight, self.radius @ weight.abs() + error)


def concatenate(parts: list[Bounded], dim: int) -> Bounded:
    return Bounded(torch.cat([p.value for p in parts], dim), torch.cat([p.radius for p in parts], dim))


def sum_error(count: int, unit: float) -> float:
    """Of a sum of `count` products, relative to the root of the sum of their squares."""
    return (4 * count**0.5 + 8) * unit
