"""What the cost model found: makespan, busy and idle time, bytes, memory, bottleneck; as text, JSON and trace."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from .cost_constants import Costs
from .queues import CoreTimeline, Dma, Unit
from .timeline import START, CostModel, Event

LEFT_OUT = (
    "A model, not a measurement. It leaves out semaphore latency between compute engines, instruction fetch, PSUM\n"
    "bank conflicts, the bus that Vector and GpSimd share, DMA bandwidth that collectives take from other transfers,\n"
    "congestion of links, register dependencies, and what the compiler reorders; see docs/cost_model.md."
)
UNITS = ("tensor", "vector", "scalar", "gpsimd", "dma", "collective")


@dataclass(frozen=True)
class EngineReport:
    """One engine of one core, the DMA engines of a core, or the collective cores of a rank.

    Attributes:
        busy_ns: DMA: the average over its engines.
        idle_ns: makespan minus busy; DMA: the time when no transfer is under way.
        waits: idle ns by reason, "data from X", "space held by X" (its output or its memory), "finished".
        useful: share of the makespan that the least time for the same work takes: for DMA, bytes at the full rate; for
            Tensor, floating-point operations at the bfloat16 peak; for others busy / makespan.
    """

    busy_ns: float
    idle_ns: float
    instructions: int
    useful: float
    waits: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CoreReport:
    """One core.

    Attributes:
        engines: by name, UNITS; "collective" on core 0 of a rank that has collectives.
        sbuf_peak_bytes, psum_peak_bytes: most bytes per partition between first and last use at one time.
        hbm_read_bytes, hbm_written_bytes, dma_bytes: by its DMAs.
        flops: of matrix multiplications, transposes left out.
    """

    rank: int
    core: int
    instructions: int
    engines: dict[str, EngineReport]
    sbuf_peak_bytes: int
    psum_peak_bytes: int
    hbm_read_bytes: int
    hbm_written_bytes: int
    dma_bytes: int
    flops: int


@dataclass(frozen=True)
class CostReport:
    """The modelled run.

    Attributes:
        makespan_ns: end of the last instruction on any core.
        bottleneck: (rank, core, engine) with the most busy time.
        roofline: its busy time / makespan.
        tensor_utilisation: floating-point operations / (bfloat16 peak of the cores x makespan).
        collective_bytes: what each rank sends to others, by rank.
        collectives: how many of each algorithm, by rank.
        sbuf_capacity, psum_capacity: bytes per partition.
        events: of every instruction when it was recorded.
    """

    target: str
    makespan_ns: float
    cores: tuple[CoreReport, ...]
    bottleneck: tuple[int, int, str]
    roofline: float
    tensor_utilisation: float
    collective_bytes: dict[int, int]
    collectives: dict[int, dict[str, int]]
    sbuf_capacity: int
    psum_capacity: int
    events: tuple[Event, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def flops(self) -> int:
        """Of all cores."""
        return sum(core.flops for core in self.cores)

    @property
    def instructions(self) -> int:
        """Of all cores."""
        return sum(core.instructions for core in self.cores)

    @property
    def dma_bytes(self) -> int:
        """Of all cores."""
        return sum(core.dma_bytes for core in self.cores)

    def core(self, rank: int = 0, core: int = 0) -> CoreReport:
        """One core's report."""
        return next(c for c in self.cores if (c.rank, c.core) == (rank, core))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without events."""
        values = {name: value for name, value in self.__dict__.items() if name not in ("events", "cores")}
        return values | {"cores": [asdict(core) for core in self.cores], "model": LEFT_OUT}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        rank, core, name = self.bottleneck
        lines = [
            f"Modelled on {self.target}: {_time(self.makespan_ns)}, {self.instructions:,} instructions, "
            f"{len(self.cores)} core(s)",
            f"Bottleneck: {name} of rank {rank} core {core}, busy {self.roofline:.1%} of the time",
            f"Tensor Engine: {self.flops:.3e} FLOP, {self.tensor_utilisation:.1%} of the bfloat16 peak",
        ]
        for rank, sent in self.collective_bytes.items():
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.collectives[rank].items())
            lines.append(f"Collectives of rank {rank}: {_size(sent)} sent ({kinds})")
        for report in self.cores:
            lines += ["", *self._core_lines(report)]
        return "\n".join([*lines, "", LEFT_OUT])

    def _core_lines(self, report: CoreReport) -> list[str]:
        lines = [
            f"rank {report.rank} core {report.core}: {report.instructions:,} instructions; "
            f"HBM {_size(report.hbm_read_bytes)} read, {_size(report.hbm_written_bytes)} written; "
            f"SBUF peak {report.sbuf_peak_bytes:,} of {self.sbuf_capacity:,} B per partition, "
            f"PSUM {report.psum_peak_bytes:,} of {self.psum_capacity:,}",
            f"  {'engine':<11}{'busy':>11}{'':>7}{'idle':>11}{'useful':>8}{'instr.':>9}  idle because",
        ]
        for name, unit in report.engines.items():
            reasons = sorted(unit.waits.items(), key=lambda item: -item[1])[:4]
            because = ", ".join(f"{reason} {_time(ns)}" for reason, ns in reasons if ns > 0.0005 * self.makespan_ns)
            lines.append(
                f"  {name:<11}{_time(unit.busy_ns):>11}{unit.busy_ns / (self.makespan_ns or 1):>7.1%}"
                f"{_time(unit.idle_ns):>11}{unit.useful:>8.1%}{unit.instructions:>9,}  {because}"
            )
        return lines

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto and chrome://tracing read; needs recorded events.

        Raises:
            ValueError: the run was not recorded.
        """
        if self.events is None:
            raise ValueError("no events to write: profile with trace=True")
        cores = max((core.core for core in self.cores), default=0) + 1
        tracks: dict[tuple[int, str], int] = {}
        trace: list[dict[str, Any]] = []
        for (rank, core), track, name, where, start, end in self.events:
            process = rank * cores + core
            if (process, track) not in tracks:
                tracks[process, track] = order = len(tracks)
                label = f"rank {rank} core {core} (modelled)"
                trace.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": label}})
                trace.append({"ph": "M", "pid": process, "tid": order, "name": "thread_name", "args": {"name": track}})
            line = f"{os.path.basename(where[0])}:{where[1]}" if where else "?"
            trace.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": tracks[process, track],
                    "name": f"{name} {line}",
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "args": {"file": where[0] if where else "?", "line": where[1] if where else 0},
                }
            )
        with open(path, "w") as file:
            json.dump({"traceEvents": trace, "displayTimeUnit": "ns", "otherData": {"model": LEFT_OUT}}, file)


def report_of(model: CostModel) -> CostReport:
    """Sum up a finished simulation."""
    costs, makespan = model.costs, model.makespan
    places = sorted(model.cores)
    cores = tuple(_core_report(model, model.cores[place]) for place in places)
    busiest = max(
        ((unit.busy_ns, (core.rank, core.core, name)) for core in cores for name, unit in core.engines.items()),
        default=(0.0, (0, 0, "none")),
        key=lambda item: item[0],
    )
    ranks = {rank: timeline for rank, timeline in model.ranks.items() if timeline.collectives.count}
    flops = sum(core.flops for core in cores)
    return CostReport(
        target=model.target.name,
        makespan_ns=makespan,
        cores=cores,
        bottleneck=busiest[1],
        roofline=busiest[0] / makespan if makespan else 0.0,
        tensor_utilisation=flops / (costs.peak_flops_per_ns * makespan * len(cores)) if makespan else 0.0,
        collective_bytes={rank: timeline.sent for rank, timeline in ranks.items()},
        collectives={rank: dict(timeline.algorithms) for rank, timeline in ranks.items()},
        sbuf_capacity=model.target.partition_bytes,
        psum_capacity=model.target.psum_partition_bytes,
        events=None if model.events is None else tuple(model.events),
    )


def _core_report(model: CostModel, core: CoreTimeline) -> CoreReport:
    costs, makespan = model.costs, model.makespan
    engines = {
        unit.name: _engine_report(unit, makespan) for unit in (core.tensor, core.vector, core.scalar, core.gpsimd)
    }
    peak = core.flops / (costs.peak_flops_per_ns * makespan) if makespan else 0.0
    engines["tensor"] = EngineReport(**{**engines["tensor"].__dict__, "useful": peak})
    engines["dma"] = _dma_report(core.dma, makespan, costs)
    rank, program = core.place
    if program == 0 and core.collectives.count:
        engines["collective"] = _engine_report(core.collectives, makespan)
    return CoreReport(
        rank=rank,
        core=program,
        instructions=core.instructions,
        engines=engines,
        sbuf_peak_bytes=core.sbuf.peak(),
        psum_peak_bytes=core.psum.peak(),
        hbm_read_bytes=core.dma.hbm_read,
        hbm_written_bytes=core.dma.hbm_written,
        dma_bytes=core.dma.bytes,
        flops=core.flops,
    )


def _engine_report(unit: Unit, makespan: float) -> EngineReport:
    waits = {f"{kind} {name}": ns for (kind, name), ns in unit.waits.items()}
    waits["finished"] = makespan - unit.free
    return EngineReport(unit.busy, makespan - unit.busy, unit.count, unit.busy / makespan if makespan else 0.0, waits)


def _dma_report(dma: Dma, makespan: float, costs: Costs) -> EngineReport:
    """Idle is when nothing is under way: each gap is put down to what the next transfer waited for."""
    pairs = sorted(zip(dma.transfers[::2], dma.transfers[1::2], dma.causes, strict=True))
    waits: dict[str, float] = {}
    covered = idle = 0.0
    for begin, end, (kind, name) in pairs:
        moving = min(begin + costs.dma_start_ns, end)
        if moving > covered:
            start = max(begin, covered)
            for reason, ns in ((f"{kind} {name}", start - covered), (START, moving - start)):
                if ns > 0.0:
                    waits[reason] = waits.get(reason, 0.0) + ns
            idle += moving - covered
        covered = max(covered, end)
    waits["finished"] = makespan - covered
    busy = sum(one.busy for one in dma.engines) / len(dma.engines)
    useful = dma.bytes / (costs.dma_peak * makespan) if makespan else 0.0
    return EngineReport(busy, idle + makespan - covered, dma.count, useful, waits)


def _time(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms" if ns >= 1e6 else f"{ns / 1e3:.2f} us"


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
