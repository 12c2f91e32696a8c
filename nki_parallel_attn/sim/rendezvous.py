"""Where ranks meet: the n-th collective of a rank list starts when every core of every rank in it has arrived.

Ranks that do something else are found from what they do, never from elapsed time: an arrival that differs from the
first one of its meeting, two ranks that wait for each other in different meetings, or a wait that nobody can end.
How the ranks of other processes are reached is the transport's business (process_transport.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from . import location
from .core import Core
from .errors import DivergenceError
from .tensor import NkiTensor


@dataclass(frozen=True)
class Signature:
    """What must be equal on every rank of a collective.

    Attributes:
        operation: name of the collective.
        details: the rest as (name, value) pairs of plain values.
    """

    operation: str
    details: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(f'{name}={value}' for name, value in self.details)})"

    def difference(self, other: Signature) -> str:
        """What differs, named."""
        if self.operation != other.operation:
            return "another collective"
        mine, theirs = dict(self.details), dict(other.details)
        return "another " + ", ".join(name for name in mine if mine[name] != theirs.get(name))


Combine = Callable[[int, Sequence[Sequence[torch.Tensor]]], Sequence[torch.Tensor | None]]
"""(index in the rank list, each rank's sources) -> new contents of each destination, or None; all as stored."""


@dataclass
class Participant:
    """One core's part of a collective.

    Attributes:
        sources: tensors it sends.
        destinations: tensors it receives into.
        combine: the collective's arithmetic, for this core's destinations.
        location: "file:line" of its call.
    """

    rank: int
    program_id: int
    sources: list[NkiTensor]
    destinations: list[NkiTensor]
    combine: Combine
    location: str

    @property
    def key(self) -> tuple[object, ...]:
        """Equal on two cores of a rank that name the same tensors: they issue one collective together."""
        tensors = self.sources + self.destinations
        return tuple((id(t.storage), t.offset, t.shape, t.strides) for t in tensors)


@dataclass
class Meeting:
    """One collective of one rank list.

    Attributes:
        ranks: the rank list.
        number: how many collectives this list has had before.
    """

    ranks: tuple[int, ...]
    number: int
    signature: Signature
    first: Participant
    arrived: dict[tuple[int, int], Participant] = field(default_factory=dict)
    done: bool = False


class Transport(Protocol):
    """Reaches the ranks of a rank list that live in other processes."""

    @property
    def local_ranks(self) -> Sequence[int]:
        """Ranks that run in this process."""

    def exchange(self, meeting: Meeting, sources: dict[int, list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Every rank's sources, in rank-list order. `sources` holds those of this process.

        Raises:
            DivergenceError: a rank is elsewhere, has ended or failed.
        """


@dataclass
class InProcess:
    """All ranks run in this process."""

    local_ranks: Sequence[int]

    def exchange(self, meeting: Meeting, sources: dict[int, list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """As they are."""
        return [sources[rank] for rank in meeting.ranks]


class World:
    """Meetings of the ranks of one simulation.

    Args:
        size: number of ranks, in all processes.
        lnc: cores per rank.
    """

    def __init__(self, size: int, lnc: int, transport: Transport) -> None:
        self.size = size
        self.lnc = lnc
        self.transport = transport
        self._counts: dict[tuple[tuple[int, ...], int, int], int] = {}
        self._open: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self._waiting: dict[tuple[int, int], Meeting] = {}

    def meet(
        self,
        core: Core,
        ranks: tuple[int, ...],
        signature: Signature,
        sources: list[NkiTensor],
        destinations: list[NkiTensor],
        combine: Combine,
        check: Callable[[], None],
    ) -> Meeting:
        """Arrive at the next collective of `ranks` and return when it has taken effect.

        Args:
            combine: the collective's arithmetic.
            check: raises when this core's sources are not fit to be read; called just before they are.
        """
        rank, program = core.rank.index, core.program_id
        place = Participant(rank, program, sources, destinations, combine, location.show(location.caller()) or "?")
        counter = (ranks, rank, program)
        number = self._counts.get(counter, 0)
        self._counts[counter] = number + 1
        meeting = self._open.setdefault((ranks, number), Meeting(ranks, number, signature, place))
        if signature != meeting.signature:
            raise DivergenceError(
                f"ranks diverge: {_who(place, self.lnc)} calls {signature} at {place.location}, "
                f"{_who(meeting.first, self.lnc)} calls {meeting.signature} at {meeting.first.location}: "
                f"{signature.difference(meeting.signature)}"
            )
        meeting.arrived[rank, program] = place
        self._refuse_crossed_waits(meeting, place)
        self._waiting[rank, program] = meeting
        if len(meeting.arrived) < self.lnc * sum(r in self.transport.local_ranks for r in ranks):
            core.scheduler.block_until(
                lambda: meeting.done, f"{signature}, collective {number} of ranks {list(ranks)}", DivergenceError
            )
            check()
        else:
            check()
            self._perform(meeting, core.computes)
            meeting.done = True
            del self._open[ranks, number]
        self._waiting.pop((rank, program), None)
        return meeting

    def _refuse_crossed_waits(self, meeting: Meeting, place: Participant) -> None:
        """Two ranks that each wait for the other in different meetings will never meet."""
        for (rank, program), other in self._waiting.items():
            if other is meeting or rank not in meeting.ranks or place.rank not in other.ranks:
                continue
            if rank == place.rank or other.done or (rank, program) in meeting.arrived:
                continue
            theirs = other.arrived[rank, program]
            raise DivergenceError(
                f"ranks diverge: {_who(place, self.lnc)} calls {meeting.signature} of ranks {list(meeting.ranks)} at "
                f"{place.location}, while {_who(theirs, self.lnc)} waits in {other.signature} of ranks "
                f"{list(other.ranks)} at {theirs.location}: another group"
            )

    def _perform(self, meeting: Meeting, computes: bool) -> None:
        local = [rank for rank in meeting.ranks if rank in self.transport.local_ranks]
        for lane in self._lanes(meeting, local):
            if not computes:
                self.transport.exchange(meeting, {rank: [] for rank in local})
                continue
            sources = {rank: _values(lane[rank]) for rank in local}
            gathered = self.transport.exchange(meeting, sources)
            results = {rank: lane[rank].combine(meeting.ranks.index(rank), gathered) for rank in local}
            for rank in local:
                for destination, value in zip(lane[rank].destinations, results[rank], strict=True):
                    if value is not None:
                        destination.put_raw(value)

    def _lanes(self, meeting: Meeting, local: list[int]) -> list[dict[int, Participant]]:
        """Cores that name the same tensors act as one; else core i of a rank meets core i of the others."""
        together = all(
            meeting.arrived[rank, program].key == meeting.arrived[rank, 0].key
            for rank in local
            for program in range(self.lnc)
        )
        return [
            {rank: meeting.arrived[rank, program] for rank in local} for program in range(1 if together else self.lnc)
        ]


def _values(place: Participant) -> list[torch.Tensor]:
    """What a core sends; copied when it also receives into that memory."""
    targets = {id(t.storage) for t in place.destinations}
    return [t.raw.clone() if id(t.storage) in targets else t.raw for t in place.sources]


def _who(place: Participant, lnc: int) -> str:
    return f"rank {place.rank}" + (f" core {place.program_id}" if lnc > 1 else "")
