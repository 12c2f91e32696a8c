"""A case: one operation on one set of inputs, run on every rank of a world and compared on each of them."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from nki_parallel_attn.backends import Backend


@dataclass(frozen=True)
class Place:
    """Where and how a case runs.

    Attributes:
        rank, world_size: of the whole world; a case of fewer ranks runs once in each `case.world` consecutive ranks.
        backend: what runs the operation.
        target: "trn2" or "trn3".
        device: where the operation's tensors are.
        seed: of the inputs.
    """

    rank: int
    world_size: int
    backend: Backend
    target: str
    device: torch.device
    seed: int

    def group(self, case: Case) -> int:
        """Which of the groups side by side this rank is in; each has inputs of its own."""
        return self.rank // case.world

    def generator(self, case: Case) -> torch.Generator:
        """Random numbers: the same on all ranks of a group, others in the next group and with another seed."""
        return torch.Generator().manual_seed(1000 * self.seed + self.group(case))

    def to_device(self, arguments: dict[str, object]) -> dict[str, object]:
        """The arguments with their tensors on the device."""
        return {
            name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in arguments.items()
        }


@dataclass(frozen=True)
class Deviation:
    """The largest distance from the oracle on one rank, and the largest that is accepted.

    Attributes:
        error: absolute; NaN where the result has a NaN.
        tolerance: absolute.
        what: which result it is.
        complaint: what else is wrong with the result, such as its shape; then `error` is infinite.
    """

    error: float
    tolerance: float
    what: str = "output"
    complaint: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """error / tolerance: above 1, or infinite, where it did not pass."""
        if self.passed:
            return self.error / self.tolerance if self.error else 0.0
        return self.error / self.tolerance if self.error > 0 and self.tolerance else float("inf")


def compare(result: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float, what: str = "output") -> Deviation:
    """`result`, which should have `dtype` and the shape of `expected`, against the float64 `expected`."""
    if result.shape != expected.shape or result.dtype != dtype:
        complaint = f"{list(result.shape)} {result.dtype} instead of {list(expected.shape)} {dtype}"
        return Deviation(float("inf"), tolerance, what, complaint)
    distance = (result.cpu().double() - expected).abs()
    return Deviation(float(distance.max()) if distance.numel() else 0.0, tolerance, what)


@dataclass(frozen=True)
class Case(abc.ABC):
    """What to run.

    Attributes:
        kernel: name of the operation.
        layout: of its cache or operands.
        scenario: what else is particular about the inputs.
        dtype: of the inputs, or "float8" or "float8_packed" for such a cache beside bfloat16 queries.
        ranks: ranks that work together.
        lnc: cores of a rank.
    """

    kernel: str
    layout: str
    scenario: str
    dtype: str
    ranks: int
    lnc: int

    @property
    def name(self) -> str:
        """A unique name."""
        return f"{self.kernel}/{self.layout}/{self.scenario}/{self.dtype}/ranks={self.ranks}/lnc={self.lnc}"

    @property
    def world(self) -> int:
        """The smallest world that it runs in; any multiple runs it several times side by side."""
        return self.ranks

    def exists_on(self, backend: str, target: str) -> bool:
        """Whether the operation takes such arguments on this backend and target at all."""
        return True

    def may_be_unavailable(self, backend: str) -> bool:
        """Whether the operation is known to have no kernel for this backend yet: its UnsupportedFeatureError is told as
        it is then. Everywhere else it is a failure like any other.
        """
        return False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of queries and outputs."""
        found: torch.dtype = getattr(torch, "bfloat16" if self.dtype.startswith("float8") else self.dtype)
        return found

    @abc.abstractmethod
    def run(self, place: Place) -> Deviation:
        """Run on this rank, as all ranks of the world do, and compare; the worst of what is compared.

        Raises what the operation raises.
        """
