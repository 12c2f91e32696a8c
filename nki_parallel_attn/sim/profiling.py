"""profile(): run a kernel through the cost model, with its data or from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .core import Checks
from .kernel import Kernel
from .rendezvous import Meeting
from .report import CostReport, report_of
from .simulation import simulate
from .targets import Target, get_target
from .timeline import CostModel

SHAPE_CHECKS = Checks(
    hardware=False, uninitialised=False, outputs=False, activation_range=False, races=False, collectives=False
)
"""Only capacity: what a run without data checks unless asked for more."""


@dataclass(frozen=True)
class VirtualPeers:
    """Transport of a world of which one rank runs: the others are taken to arrive with it, doing the same."""

    local_ranks: Sequence[int]

    def exchange(self, meeting: Meeting, sources: dict[int, list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Nothing: there is no data."""
        return []


class Profile:
    """A kernel with the options of `profile`; call it with the kernel's arguments, as `simulate` is called."""

    def __init__(
        self,
        kernel: Kernel | Callable[..., Any],
        world_size: int | None,
        lnc: int | None,
        target: Target,
        compute: bool,
        only_rank: int | None,
        checks: bool | Checks,
        trace: bool,
        unknown_value: int,
    ) -> None:
        self._target = target
        self._trace = trace
        self._world_size = world_size
        self._only_rank = only_rank
        self._simulation = simulate(
            kernel, world_size=world_size, lnc=lnc, target=target, checks=checks, compute=compute, precise=True
        )
        self._simulation.unknown_value = unknown_value

    def __call__(self, *args: Any, **kwargs: Any) -> CostReport:
        """Run the kernel.

        With world_size: one sequence of per-rank arguments; with `representative`, that rank's arguments alone.
        """
        model = CostModel(self._target, self._trace)
        self._simulation.observers = [model]
        if self._only_rank is None:
            self._simulation(*args, **kwargs)
        else:
            assert self._world_size is not None
            self._simulation.run([(args, kwargs)], VirtualPeers((self._only_rank,)), self._world_size)
        return report_of(model)


def profile(
    kernel: Kernel | Callable[..., Any],
    *,
    world_size: int | None = None,
    lnc: int | None = None,
    target: str | Target | None = None,
    compute: bool = False,
    representative: bool | int = False,
    checks: bool | Checks | None = None,
    trace: bool = False,
    unknown_value: int = 0,
) -> Profile:
    """Prepare to run a kernel through the cost model; calling the result returns a CostReport.

    Args:
        kernel, world_size, lnc, target: as for simulate(); trn2 and trn3.
        compute: False charges the instructions without computing data: none is allocated, arguments may be torch
            meta tensors or ShapeOnly. Addresses and registers that come from tensors are then unknown: an indirect
            access is taken to be in bounds and to touch rows anywhere in its tensor; a register loaded from a tensor,
            and a scalar offset, is `unknown_value`. Rows that oob_mode.skip would leave out are charged.
        representative: run one rank of the world (True: rank 0, or its number), without data; its peers arrive at every
            collective when it does.
        checks: as for simulate(); by default all with data, capacity alone without.
        trace: keep every instruction with its kernel line, for CostReport.write_trace().
        unknown_value: see `compute`.

    Raises:
        ValueError: the model does not cover the target, or `representative` without a world or with data.
    """
    only_rank = None if representative is False else 0 if representative is True else representative
    if only_rank is not None:
        if world_size is None or not 0 <= only_rank < world_size:
            raise ValueError(f"representative is {representative}, expected a rank of world_size={world_size}")
        if compute:
            raise ValueError("representative runs without data: its peers have none to send")
    if checks is None:
        checks = True if compute else SHAPE_CHECKS
    chosen = get_target(target)
    return Profile(kernel, world_size, lnc, chosen, compute, only_rank, checks, trace, unknown_value)
