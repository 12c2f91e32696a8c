"""What executes instructions on the timeline: compute engines, DMA engines and queues, collective cores."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Any

from .cost_constants import Costs
from .cost_dma import Transfer
from .enums import MemoryRegion, engine
from .hazards import History
from .reuse import Space
from .targets import Target

Place = tuple[int, int]
"""(rank, core)."""


class Unit:
    """An engine, or the collective cores of a rank.

    Attributes:
        free: when it can start its next instruction.
        busy: ns of instructions.
        waits: ns it stood still, by (kind, what it waited for).
        last_start: start of its last instruction (Tensor Engine: the next stationary tile loads from then on).
    """

    __slots__ = ("busy", "count", "free", "ghz", "last_start", "name", "waits")

    def __init__(self, name: str, ghz: float = 1.0) -> None:
        self.name = name
        self.ghz = ghz
        self.free = 0.0
        self.busy = 0.0
        self.count = 0
        self.last_start = 0.0
        self.waits: dict[tuple[str, str], float] = {}

    def wait(self, ns: float, kind: str, cause: Any) -> None:
        """Note that it stands still for `ns`."""
        key = (kind, cause.name if cause is not None else "")
        self.waits[key] = self.waits.get(key, 0.0) + ns


class DmaEngine:
    """Busy intervals of one DMA engine; transfers go into the first gap that fits."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def book(self, ready: float, ns: float) -> float:
        """The end of a transfer of `ns` that can start at `ready`."""
        starts, ends = self.starts, self.ends
        if not ends or ready > ends[-1]:
            starts.append(ready)
            ends.append(ready + ns)
            return ready + ns
        if ready == ends[-1]:
            ends[-1] = end = ready + ns
            return end
        index = bisect_right(ends, ready)
        begin = ready
        while index < len(starts) and starts[index] - begin < ns:
            if ends[index] > begin:
                begin = ends[index]
            index += 1
        end = begin + ns
        if index > 0 and ends[index - 1] == begin:
            ends[index - 1] = end
        else:
            starts.insert(index, begin)
            ends.insert(index, end)
        return end

    @property
    def busy(self) -> float:
        """ns of transfers."""
        return sum(self.ends) - sum(self.starts)


class Dma(Unit):
    """DMA engines and queues of one core.

    Attributes:
        transfers: begin and end of each, in pairs.
        causes: (kind, name) of what each waited for.
    """

    __slots__ = ("bytes", "causes", "engines", "hardware", "hbm_read", "hbm_written", "queues", "transfers", "uniform")

    def __init__(self, costs: Costs) -> None:
        super().__init__("dma")
        self.engines = [DmaEngine()]
        self.uniform = True
        self.queues = [(0.0, index) for index in range(costs.dma_queues)]
        self.hardware = [0.0] * costs.hwdge_units
        self.transfers = array("d")
        self.causes: list[tuple[str, str]] = []
        self.bytes = self.hbm_read = self.hbm_written = 0

    def book(self, ready: float, found: Transfer, costs: Costs) -> float:
        """The end of a transfer. While all transfers use all engines, one stands for the others."""
        if self.uniform and found.engines < costs.dma_engines:
            self.uniform = False
            first = self.engines[0]
            self.engines = [first]
            for _ in range(costs.dma_engines - 1):
                other = DmaEngine()
                other.starts, other.ends = first.starts.copy(), first.ends.copy()
                self.engines.append(other)
        if self.uniform:
            return self.engines[0].book(ready, found.ns)
        return max(
            self.engines[index].book(ready, found.ns)
            for index in range(found.first_engine, found.first_engine + found.engines)
        )


class CoreTimeline:
    """One core's engines, queues and on-chip memories."""

    def __init__(self, place: Place, target: Target, costs: Costs, collectives: Unit) -> None:
        self.place = place
        self.tensor = Unit("tensor", costs.tensor_ghz)
        self.vector = Unit("vector", costs.vector_ghz)
        self.scalar = Unit("scalar", costs.scalar_ghz)
        self.gpsimd = Unit("gpsimd", costs.gpsimd_ghz)
        self.sync = Unit("sync")
        self.dma = Dma(costs)
        self.collectives = collectives
        self.sbuf = Space(target.partition_bytes)
        self.psum = Space(target.psum_partition_bytes)
        self.arenas: dict[MemoryRegion, History] = {}
        self.instructions = 0
        self.flops = 0

    def unit(self, kind: engine) -> Unit:
        """The compute engine `kind`."""
        found: Unit = getattr(self, kind.name)
        return found


class RankTimeline:
    """What the cores of a rank share."""

    def __init__(self) -> None:
        self.collectives = Unit("collective")
        self.sent = 0
        self.algorithms: dict[str, int] = {}
