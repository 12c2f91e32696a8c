"""Race detection between the cores of a rank, by vector clocks.

Cores share shared HBM only. Each access of a core to it gets a number, counted per core; for every element the last
access of each core is kept, reads and writes apart. `clock[c][d]` is the last access of core d that core c is ordered
after: barriers, exchanges and collectives raise it. An access races with an earlier one of core d whose number is
greater, when they touch the same element and one of them writes. The schedule plays no part, so a race is found
whichever core ran first.

A collective counts as an access of every core that takes part, and orders them only once it has happened. Cores that
name the same tensors take part as one; cores that name others run collectives of their own, which may race.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .core import Core, fail
from .enums import MemoryRegion
from .instruction import Call
from .location import show
from .memory import Storage
from .rendezvous import Participant
from .tensor import GatheredTensor, NkiTensor

Numbers = np.ndarray[Any, np.dtype[np.int32]]
Access = tuple[NkiTensor, bool]


class RaceDetector:
    """An observer of the instructions of one simulation, for ranks of several cores."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._met: dict[tuple[int, int], Any] = {}

    def on_instruction(self, call: Call) -> None:
        """Check the instruction's accesses; move the clocks where cores have met."""
        core = call.core
        rank = self._ranks.get(core.rank.index)
        if rank is None:
            rank = self._ranks[core.rank.index] = _Rank(core.rank.lnc)
        if call.meeting is None:
            accesses = _shared_accesses(call.reads, call.writes)
            if accesses:
                rank.access(core.program_id, call, accesses)
        elif self._met.pop((core.rank.index, core.program_id), None) is not call.meeting:
            self._meet(rank, core, call)

    def _meet(self, rank: _Rank, core: Core, call: Call) -> None:
        """The first core of the rank to leave a meeting reports for all of them: the others have not moved yet."""
        brought = {
            program: value for (index, program), value in call.meeting.arrived.items() if index == core.rank.index
        }
        participants = {program: value for program, value in brought.items() if isinstance(value, Participant)}
        accesses = {program: _shared_accesses(v.sources, v.destinations) for program, v in participants.items()}
        if len({value.key for value in participants.values()}) == 1:
            rank.access_together(accesses, call)
        else:
            for program, mine in accesses.items():
                rank.access(program, call, mine)
        rank.order(brought)
        for program in brought:
            if program != core.program_id:
                self._met[core.rank.index, program] = call.meeting


def _shared_accesses(reads: Iterable[NkiTensor], writes: Iterable[NkiTensor]) -> list[Access]:
    shared = MemoryRegion.shared_hbm
    found = [(tensor, False) for tensor in reads if tensor.storage.region is shared]
    return found + [(tensor, True) for tensor in writes if tensor.storage.region is shared]


class _Rank:
    """Clocks and last accesses of one rank.

    Attributes:
        clocks: [core][core].
        log: per core, what each of its accesses was; number n is entry n - 1.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.clocks = [[0] * cores for _ in range(cores)]
        self.log: list[list[tuple[str, tuple[str, int] | None]]] = [[] for _ in range(cores)]
        self._last: WeakKeyDictionary[Storage, _LastAccesses] = WeakKeyDictionary()

    def access(self, core: int, call: Call, accesses: list[Access]) -> None:
        self._check(core, call, accesses)
        self._record(core, call, accesses)

    def access_together(self, accesses: dict[int, list[Access]], call: Call) -> None:
        """Accesses of several cores that take part in a collective as one and do not race with each other."""
        for core, mine in accesses.items():
            self._check(core, call, mine)
        for core, mine in accesses.items():
            self._record(core, call, mine)

    def order(self, cores: Iterable[int]) -> None:
        """Everything that any of `cores` has done so far comes before what they do from now on."""
        cores = list(cores)
        for core in cores:
            self.clocks[core][core] = len(self.log[core])
        joined = [max(self.clocks[core][other] for core in cores) for other in range(self.cores)]
        for core in cores:
            self.clocks[core] = joined.copy()

    def _check(self, core: int, call: Call, accesses: list[Access]) -> None:
        for tensor, writes in accesses:
            last = self._last.get(tensor.storage)
            if last is None:
                continue
            for other in range(self.cores):
                if other == core:
                    continue
                for earlier_writes in (True, False) if writes else (True,):
                    numbers = last.of(other, earlier_writes, tensor)
                    if numbers is not None and (newest := int(numbers.max())) > self.clocks[core][other]:
                        self._report(core, call, tensor, writes, other, earlier_writes, newest)

    def _record(self, core: int, call: Call, accesses: list[Access]) -> None:
        self.log[core].append((call.name, call.location))
        number = len(self.log[core])
        for tensor, writes in accesses:
            last = self._last.get(tensor.storage)
            if last is None:
                last = self._last[tensor.storage] = _LastAccesses(self.cores)
            last.set(core, writes, tensor, number)

    def _report(
        self, core: int, call: Call, tensor: NkiTensor, writes: bool, other: int, other_writes: bool, number: int
    ) -> None:
        name, where = self.log[other][number - 1]
        fail(
            "race",
            f"core {core} {'writes' if writes else 'reads'} {tensor.name} {list(tensor.shape)} in {call.name}, core "
            f"{other} {'writes' if other_writes else 'reads'} the same elements in {name} at {show(where)}: nothing "
            "orders the two",
        )


class _LastAccesses:
    """For every element of a storage, the number of each core's last read and last write of it, 0 when none."""

    def __init__(self, cores: int) -> None:
        self._grain = 0
        self._numbers: dict[tuple[int, bool], Numbers] = {}

    def of(self, core: int, writes: bool, tensor: NkiTensor) -> Numbers | None:
        """Numbers of the elements of `tensor`; None when the core has made no such access to the storage."""
        if (core, writes) not in self._numbers:
            return None
        self._refine(tensor)
        found: Numbers = tensor.flag_view(self._numbers[core, writes], self._grain)
        return found

    def set(self, core: int, writes: bool, tensor: NkiTensor, number: int) -> None:
        """Note access `number` of `core` to every element of `tensor`."""
        self._refine(tensor)
        numbers = self._numbers.get((core, writes))
        if numbers is None:
            storage = tensor.storage
            size = storage.elements * storage.dtype.itemsize // self._grain
            numbers = self._numbers[core, writes] = np.zeros(size, dtype=np.int32)
        if isinstance(tensor, GatheredTensor):
            grid, index = tensor.flag_grid(numbers, self._grain)
            grid[index] = number
        else:
            tensor.flag_view(numbers, self._grain)[...] = number

    def _refine(self, tensor: NkiTensor) -> None:
        """Keep one number per as many bytes as the smallest element that has been accessed."""
        itemsize = tensor.dtype.itemsize
        if self._grain == 0:
            self._grain = min(itemsize, tensor.storage.dtype.itemsize)
        elif itemsize < self._grain:
            for key, numbers in self._numbers.items():
                self._numbers[key] = np.repeat(numbers, self._grain // itemsize)
            self._grain = itemsize
