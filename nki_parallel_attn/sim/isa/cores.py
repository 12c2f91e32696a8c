"""Synchronisation between the cores of one rank. Source: nki/api/nki/isa/__init__.py, core_barrier and sendrecv."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import location
from ..enums import MemoryRegion, nc_version
from ..enums import dma_engine as DmaEngine
from ..enums import engine as Engine
from ..errors import DivergenceError
from ..instruction import Call, instruction
from ..tensor import NkiTensor

_GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}


@dataclass
class CoreMeeting:
    """The n-th barrier, or the n-th exchange on one pipe, of a rank's cores.

    Attributes:
        arrived: (rank, core) -> what the core brought.
    """

    arrived: dict[tuple[int, int], Any] = field(default_factory=dict)
    done: bool = False


def _meet(call: Call, what: str, brought: Any, perform: Callable[[dict[int, Any]], None]) -> None:
    """Wait until every core of the rank has come to its n-th `what`; the last one performs."""
    core = call.core
    meetings: dict[tuple[str, int], CoreMeeting] = core.rank.state.setdefault("core meetings", {})
    counts: dict[str, int] = core.state.setdefault("core meetings", {})
    number = counts.get(what, 0)
    counts[what] = number + 1
    meeting = meetings.setdefault((what, number), CoreMeeting())
    meeting.arrived[core.rank.index, core.program_id] = brought
    call.meeting = meeting
    if len(meeting.arrived) < core.rank.lnc:
        core.scheduler.block_until(lambda: meeting.done, f"the other core in {what}")
        return
    perform({program: value for (_, program), value in meeting.arrived.items()})
    meeting.done = True
    del meetings[what, number]


def _require_two_cores(call: Call) -> None:
    call.require_target(nc_version.gen3, call.name)
    if call.core.rank.lnc != 2:
        call.fail("lnc", "needs two cores; launch with kernel[2]")


@instruction(
    engine=lambda data, cores, engine, name: engine,
    engines=(Engine.gpsimd, Engine.tensor, Engine.scalar, Engine.vector, Engine.sync),
)
def core_barrier(
    call: Call, data: NkiTensor, cores: tuple[int, ...], engine: Engine = Engine.gpsimd, name: str | None = None
) -> None:
    """No core passes before both have arrived; what one wrote to shared HBM before, the other may read after.

    Args:
        data: the shared HBM tensor that the barrier protects.
        cores: (0, 1).
        engine: which engine waits.
    """
    _require_two_cores(call)
    if tuple(cores) != (0, 1):
        call.fail("core-barrier-cores", f"cores is {cores!r}, expected (0, 1)")
    region = data.buffer
    call.require(region is MemoryRegion.shared_hbm, "core-barrier-data", f"data is in {region.value}, not shared HBM")
    where = location.show(call.location)

    def compare(brought: dict[int, tuple[NkiTensor, str]]) -> None:
        (mine, here), (theirs, there) = brought[0], brought[1]
        if mine.storage is not theirs.storage:
            call.require(
                False,
                "core-barrier-data",
                f"core 0 waits on {mine.name} {list(mine.shape)} at {here}, "
                f"core 1 on {theirs.name} {list(theirs.shape)} at {there}",
            )

    _meet(call, "core_barrier", (data, where), compare)


@dataclass
class _Exchange:
    src: NkiTensor
    dst: NkiTensor
    to: int
    source: int
    location: str


@instruction(engine=Engine.dma, reads=("src",), writes=("dst",), elementwise=("src", "dst"))
def sendrecv(
    call: Call,
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: DmaEngine = DmaEngine.dma,
    name: str | None = None,
) -> None:
    """Send src to one core of the rank and receive dst from one.

    Args:
        send_to_rank, recv_from_rank: core indices, 0 or 1.
        pipe_id: exchanges meet by their order within a pipe.
        dma_engine: gpsimd_dma takes at most 1024, 512 or 256 bytes per partition of 32-, 16- or 8-bit types.
    """
    _require_two_cores(call)
    if send_to_rank not in (0, 1) or recv_from_rank not in (0, 1):
        call.fail("sendrecv-rank", f"send_to_rank={send_to_rank!r}, recv_from_rank={recv_from_rank!r}, expected 0 or 1")
    for operand, tensor in (("src", src), ("dst", dst)):
        call.require(
            tensor.buffer is MemoryRegion.sbuf, "memory-access", f"{operand} is in {tensor.buffer.value}, not SBUF"
        )
    if src.dtype != dst.dtype:
        call.fail("matching-dtype", f"src is {src.dtype}, dst is {dst.dtype}")
    if dma_engine is DmaEngine.gpsimd_dma:
        size, limit = src.free_size * src.dtype.itemsize, _GPSIMD_DMA_BYTES[src.dtype.itemsize]
        call.require(size <= limit, "sendrecv-size", f"{size} bytes per partition of {src.dtype}, at most {limit}")
    call.work["exchanged"] = src.size * src.dtype.itemsize
    mine = _Exchange(src, dst, send_to_rank, recv_from_rank, location.show(call.location) or "?")

    def perform(exchanges: dict[int, _Exchange]) -> None:
        for core, exchange in exchanges.items():
            peer = exchanges[exchange.source]
            if peer.to != core:
                raise DivergenceError(
                    f"sendrecv on pipe {pipe_id}: core {core} at {exchange.location} receives from core "
                    f"{exchange.source}, which at {peer.location} sends to core {peer.to}"
                )
            if (peer.src.shape, peer.src.dtype) != (exchange.dst.shape, exchange.dst.dtype):
                raise DivergenceError(
                    f"sendrecv on pipe {pipe_id}: core {core} at {exchange.location} receives {exchange.dst.dtype} "
                    f"{list(exchange.dst.shape)}, core {exchange.source} at {peer.location} sends {peer.src.dtype} "
                    f"{list(peer.src.shape)}"
                )
        if not call.core.computes:
            return
        values = {core: exchange.src.raw.clone() for core, exchange in exchanges.items()}
        for exchange in exchanges.values():
            exchange.dst.put_raw(values[exchange.source])

    _meet(call, f"sendrecv on pipe {pipe_id}", mine, perform)
