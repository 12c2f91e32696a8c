"""The scheduler of the cost model: when each instruction would start and end on the device.

Each compute engine of each core is an in-order queue. An instruction starts when its engine is free and what it needs
is there: its inputs written (data), its outputs no longer read or written by others, their space free (space). DMAs
overlap: each waits for one of 16 queues, then a start-up time, then its share of the DMA engines. Collectives of a rank
run one after the other, and start when the last rank has arrived; barriers hold the engine they run on.

CostModel is an observer of a simulation; report.py sums up what it saw.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .core import Core
from .cost_collectives import COLLECTIVE_RULES, Exchange, exchange_of
from .cost_constants import costs_of
from .cost_dma import Transfer, transfer, transfer_of
from .cost_rules import cycles_of
from .enums import MemoryRegion, dma_engine, engine
from .hazards import History, Interval, Lane, history_of
from .instruction import Call
from .memory import Storage
from .queues import CoreTimeline, Place, RankTimeline, Unit
from .targets import Target
from .tensor import NkiTensor

Event = tuple[Place, str, str, tuple[str, int] | None, float, float]
"""(where, track, instruction, kernel line, start, end)."""
Touched = list[tuple[History, Interval | None, tuple[Lane, int, int] | None]]
"""What an instruction touches: a history's only interval, or a range of a lane."""
Ready = tuple[float, str | None, Any, bool]
"""(time, kind of the last wait, what was waited for, whether the engine's instruction just before wrote an input)."""

DATA, SPACE, START, PEER = "data from", "space held by", "DMA start-up", "arrival of"


class CostModel:
    """Observer that places every instruction on the timeline.

    Args:
        record: keep every instruction for the trace, with its kernel line.
    """

    def __init__(self, target: Target, record: bool = False) -> None:
        self.target = target
        self.costs = costs_of(target)
        self.cores: dict[Place, CoreTimeline] = {}
        self.ranks: dict[int, RankTimeline] = {}
        self.events: list[Event] | None = [] if record else None
        self.makespan = 0.0
        self._by_core: dict[Core, CoreTimeline] = {}
        self._met: dict[Place, Any] = {}
        self._exchanges: dict[tuple[Any, ...], Exchange] = {}

    def on_instruction(self, call: Call) -> None:
        """Place one instruction."""
        core = self._by_core.get(call.core)
        if core is None:
            core = self._by_core[call.core] = self._core((call.core.rank.index, call.core.program_id))
        core.instructions += 1
        if call.skipped:
            return
        if call.meeting is not None:
            self._meet(call, core)
        elif call.engine is engine.dma:
            self._transfer(call, core)
        elif call.engine is engine.tensor:
            self._multiply(call, core)
        else:
            self._compute(call, core)

    def _core(self, place: Place) -> CoreTimeline:
        core = self.cores.get(place)
        if core is None:
            rank = self.ranks.setdefault(place[0], RankTimeline())
            core = self.cores[place] = CoreTimeline(place, self.target, self.costs, rank.collectives)
        return core

    # Dependencies.

    def _history(self, storage: Storage, core: CoreTimeline) -> History:
        region = storage.region
        space = core.psum if region is MemoryRegion.psum else core.sbuf
        found: History | None
        if storage.arena is not None and storage.address is not None:
            found = core.arenas.get(region)
            if found is None:
                found = History(self.target.partitions, storage.arena.partition_bytes, shared=True)
                core.arenas[region] = found
            space.placed = max(space.placed, storage.address[1] + storage.free_elements * storage.dtype.itemsize)
        else:
            found = history_of(storage)
            if storage.free_elements and storage.pool_bytes:
                found.tenant, ready, cause = space.admit(storage.pool_bytes, core.instructions)
                found.space = space
                if ready and found.only is not None:
                    found.only[0:2] = ready, cause
        storage.history = found
        return found

    def _wait(
        self,
        reads: Iterable[NkiTensor],
        writes: Iterable[NkiTensor],
        core: CoreTimeline,
        since: float = 0.0,
        unit: Unit | None = None,
    ) -> tuple[Ready, Touched, Touched]:
        """When the operands are ready, from `since` on, for an engine that is free then; and what was touched."""
        ready, kind, cause, follows = since, None, None, False
        read: Touched = []
        written: Touched = []
        for tensor in reads:
            storage = tensor.storage
            history: History = storage.history or self._history(storage, core)
            only = history.only
            if only is not None and tensor.size == storage.elements:
                read.append((history, only, None))
                end = only[0]
                if end > ready:
                    ready, kind, cause = end, DATA, only[1]
                elif end == since and only[1] is unit:
                    follows = True
            else:
                for piece in history.pieces(tensor):
                    read.append((history, None, piece))
                    for interval in piece[0].range(piece[1], piece[2]):
                        end = interval[0]
                        if end > ready:
                            ready, kind, cause = end, DATA, interval[1]
                        elif end == since and interval[1] is unit:
                            follows = True
        for tensor in writes:
            storage = tensor.storage
            history = storage.history or self._history(storage, core)
            only = history.only
            if only is not None and tensor.size == storage.elements:
                written.append((history, only, None))
                if only[0] > ready:
                    ready, kind, cause = only[0], SPACE, only[1]
                if only[2] > ready:
                    ready, kind, cause = only[2], SPACE, only[3]
            else:
                for piece in history.pieces(tensor):
                    written.append((history, None, piece))
                    for interval in piece[0].range(piece[1], piece[2]):
                        if interval[0] > ready:
                            ready, kind, cause = interval[0], SPACE, interval[1]
                        if interval[2] > ready:
                            ready, kind, cause = interval[2], SPACE, interval[3]
        return (ready, kind, cause, follows), read, written

    def _finish(self, read: Touched, written: Touched, core: CoreTimeline, end: float, unit: Unit) -> None:
        """Note accesses that end at `end`; what an instruction reads and writes counts as written."""
        now = core.instructions
        for history, only, piece in read:
            if only is not None and history.only is only:
                if end > only[2]:
                    only[2] = end
                    only[3] = unit
            else:
                found = piece[0].range(piece[1], piece[2]) if piece is not None else history.intervals()
                for interval in found:
                    if end > interval[2]:
                        interval[2] = end
                        interval[3] = unit
            tenant = history.tenant
            if tenant is not None:
                tenant.last = now
                if end > tenant.end:
                    tenant.end = end
                    tenant.by = unit
        for history, _, piece in written:
            if piece is not None:
                piece[0].write(piece[1], piece[2], end, unit)
            else:
                history.write(end, unit)
            tenant = history.tenant
            if tenant is not None:
                tenant.last = now
                if end > tenant.end:
                    tenant.end = end
                    tenant.by = unit
        if end > self.makespan:
            self.makespan = end

    # Engines.

    def _compute(self, call: Call, core: CoreTimeline) -> None:
        costs, kind = self.costs, call.engine
        unit = (
            core.vector if kind is engine.vector else core.scalar if kind is engine.scalar
            else core.gpsimd if kind is engine.gpsimd else core.sync
        )  # fmt: skip
        cycles = cycles_of(call, costs)
        (ready, reason, cause, follows), read, written = self._wait(call.reads, call.writes, core, unit.free, unit)
        issue = cycles.issue
        if cycles.elements < costs.short_elements or (follows and reason is None):
            issue += costs.wait_cycles
        end = self._run(call, core, unit, ready, issue / unit.ghz, reason, cause)
        self._finish(read, written, core, end, unit)

    def _run(
        self, call: Call, core: CoreTimeline, unit: Unit, ready: float, ns: float, kind: str | None, cause: Any
    ) -> float:
        """Occupy `unit` from `ready` for `ns`."""
        if kind is not None:
            unit.wait(ready - unit.free, kind, cause)
        end = ready + ns
        unit.last_start = ready
        unit.free = end
        unit.busy += ns
        unit.count += 1
        if self.events is not None:
            self.events.append((core.place, unit.name, call.name, call.location, ready, end))
        return end

    def _multiply(self, call: Call, core: CoreTimeline) -> None:
        """Load the stationary tile, during the previous multiplication where possible, then stream the moving one."""
        unit = core.tensor
        cycles = cycles_of(call, self.costs)
        stationary = call.argument("data" if call.name == "nc_transpose" else "stationary")
        others = [tensor for tensor in call.reads if tensor is not stationary]
        (load_start, kind, cause, _), loaded, _ = self._wait((stationary,), (), core, unit.last_start)
        load_end = load_start + cycles.load / unit.ghz
        ready = max(unit.free, load_end)
        loading = load_end - max(unit.free, load_start) if load_end > unit.free else 0.0
        (start, later_kind, later_cause, _), read, written = self._wait(others, call.writes, core, ready)
        if start > ready:
            ready, kind, cause, loading = start, later_kind, later_cause, 0.0
        idle = ready - unit.free - loading
        if idle > 0.0:
            unit.wait(idle, kind or DATA, cause)
        unit.busy += loading
        core.flops += cycles.flops
        end = self._run(call, core, unit, ready, cycles.issue / unit.ghz, None, None)
        self._finish(loaded, [], core, load_end, unit)
        self._finish(read, written, core, end, unit)

    # DMA.

    def _transfer(self, call: Call, core: CoreTimeline) -> None:
        found = transfer_of(call, self.costs)
        (ready, kind, cause, _), read, written = self._wait(call.reads, call.writes, core)
        end = self._move(call, core, found, ready, kind, cause)
        self._finish(read, written, core, end, core.dma)

    def _move(
        self, call: Call, core: CoreTimeline, found: Transfer, ready: float, kind: str | None, cause: Any
    ) -> float:
        """Trigger a transfer whose operands are ready at `ready`; returns its end."""
        dma, costs = core.dma, self.costs
        queue_free, queue = dma.queues[0]
        if queue_free > ready:
            ready, kind, cause = queue_free, SPACE, dma
        if found.trigger is engine.gpsimd:
            unit = core.gpsimd
            if ready > unit.free and kind is not None:
                unit.wait(ready - unit.free, kind, cause)
            begin = max(ready, unit.free)
            cycles = max(costs.min_cycles, found.descriptors * costs.swdge_cycles)
            unit.free = ready = begin + cycles / unit.ghz
            unit.busy += ready - begin
            kind, cause = DATA, unit
        elif found.trigger is not engine.dma:
            slots = dma.hardware
            slot = slots.index(min(slots)) if found.trigger is engine.unknown else int(found.trigger is engine.scalar)
            ready = max(ready, slots[slot]) + costs.hwdge_ns
            slots[slot] = ready
        end = dma.book(ready + costs.dma_start_ns, found, costs)
        heapq.heapreplace(dma.queues, (end, queue))
        dma.transfers.extend((ready, end))
        dma.causes.append((kind or START, cause.name if cause is not None else ""))
        dma.count += 1
        dma.bytes += found.bytes
        dma.hbm_read += found.hbm_read
        dma.hbm_written += found.hbm_written
        if self.events is not None:
            self.events.append((core.place, f"dma queue {queue:02}", call.name, call.location, ready, end))
        return end

    # Meetings of cores and ranks. The first core that leaves one places it for all: the others have not moved since.

    def _meet(self, call: Call, core: CoreTimeline) -> None:
        if self._met.pop(core.place, None) is call.meeting:
            return
        arrived = {place: value for place, value in call.meeting.arrived.items() if place != core.place}
        for place in arrived:
            self._met[place] = call.meeting
        cores = [self._core(place) for place in call.meeting.arrived]
        if call.name == "core_barrier":
            self._barrier(call, cores)
        elif call.name == "sendrecv":
            self._swap(call, cores)
        else:
            self._collective(call, cores)

    def _barrier(self, call: Call, cores: Sequence[CoreTimeline]) -> None:
        """Each core's engine waits until both have finished with the shared tensor."""
        shared = call.argument("data").storage
        whole = NkiTensor(shared.shape, shared.dtype, shared)
        (ready, kind, cause, _), _, written = self._wait((), (whole,), cores[0])
        units = [core.unit(call.engine) for core in cores]
        last = max(units, key=lambda unit: unit.free)
        if last.free > ready:
            ready, kind, cause = last.free, PEER, last
        for core, unit in zip(cores, units, strict=True):
            _idle(unit, ready, kind, cause)
            self._run(call, core, unit, ready, self.costs.barrier_ns, None, None)
        self._finish([], written, cores[0], ready + self.costs.barrier_ns, units[0])

    def _swap(self, call: Call, cores: Sequence[CoreTimeline]) -> None:
        """Both cores' tiles move at once, when both are ready."""
        accesses = []
        ready, kind, cause = 0.0, None, None
        by_gpsimd = call.argument("dma_engine") is dma_engine.gpsimd_dma
        for core in cores:
            part = call.meeting.arrived[core.place]
            mine, read, written = self._wait((part.src,), (part.dst,), core)
            accesses.append((core, part, read, written))
            if mine[0] > ready:
                ready, kind, cause, _ = mine
            if by_gpsimd and core.gpsimd.free > ready:
                ready, kind, cause = core.gpsimd.free, PEER, core.gpsimd
        ends = []
        for core, part, _, _ in accesses:
            if by_gpsimd:
                unit = core.gpsimd
                _idle(unit, ready, kind, cause)
                ns = part.src.size * part.src.dtype.itemsize / self.costs.gpsimd_dma_bytes_per_ns
                ends.append(self._run(call, core, unit, ready, max(ns, self.costs.min_cycles / unit.ghz), None, None))
            else:
                moved = transfer(part.dst, [part.src], self.costs, 1.0, engine.dma)
                ends.append(self._move(call, core, moved, ready, kind, cause))
        for core, _, read, written in accesses:
            self._finish(read, written, core, max(ends), core.gpsimd if by_gpsimd else core.dma)

    def _collective(self, call: Call, cores: Sequence[CoreTimeline]) -> None:
        """Starts when the operands of every rank are ready and their collective cores are free."""
        accesses = []
        ready, kind, cause = 0.0, None, None
        sizes: dict[int, dict[Any, tuple[list[int], list[int]]]] = {}
        for core in cores:
            part = call.meeting.arrived[core.place]
            mine, read, written = self._wait(part.sources, part.destinations, core)
            accesses.append((core, read, written))
            if mine[0] > ready:
                ready, kind, cause, _ = mine
            if core.collectives.free > ready:
                ready, kind, cause = core.collectives.free, PEER, core.collectives
            sizes.setdefault(core.place[0], {})[part.key] = (_bytes(part.sources), _bytes(part.destinations))
        found = self._exchange(call, next(iter(sizes.values())).values())
        end = ready + found.ns
        for rank in sizes:
            timeline = self.ranks[rank]
            unit = timeline.collectives
            _idle(unit, ready, kind, cause)
            unit.free = end
            unit.busy += found.ns
            unit.count += 1
            timeline.sent += found.sent
            timeline.algorithms[found.algorithm] = timeline.algorithms.get(found.algorithm, 0) + 1
            if self.events is not None:
                self.events.append(((rank, 0), "collective", call.name, call.location, ready, end))
        for core, read, written in accesses:
            self._finish(read, written, core, end, core.collectives)

    def _exchange(self, call: Call, sizes: Collection[tuple[list[int], list[int]]]) -> Exchange:
        """One rank's cost; cores that bring tensors of their own add up."""
        sources = [size for mine, _ in sizes for size in mine]
        destinations = [size for _, mine in sizes for size in mine]
        ranks = call.work["collective"]["ranks"]
        key = (call.name, ranks, *sources, *destinations)
        if key not in self._exchanges:
            lnc = call.core.rank.lnc
            self._exchanges[key] = exchange_of(call.name, ranks, sources, destinations, lnc, self.costs)
        return self._exchanges[key]


def _idle(unit: Unit, until: float, kind: str | None, cause: Any) -> None:
    """Let `unit` stand still until a meeting begins."""
    if until > unit.free:
        unit.wait(until - unit.free, kind or PEER, cause)
        unit.free = until


def _bytes(tensors: Iterable[NkiTensor]) -> list[int]:
    return [tensor.size * tensor.dtype.itemsize for tensor in tensors]


MEETING_RULES = ("core_barrier", "sendrecv", *COLLECTIVE_RULES)
