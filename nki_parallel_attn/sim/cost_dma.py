"""How long a transfer occupies the DMA engines.

An SBUF tile is moved by one engine for every 8 of its partitions. An engine moves descriptors, the longest runs of
bytes that are contiguous on both sides; short ones waste most of its rate (`Costs.dma_efficiency`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cost_constants import Costs
from .enums import HBM_REGIONS, dge_mode, engine
from .errors import UnsupportedInstructionError
from .instruction import Call
from .tensor import GatheredTensor, NkiTensor


class Transfer(NamedTuple):
    """One DMA.

    Attributes:
        first_engine, engines: which DMA engines of the core take part.
        ns: how long each of them is busy.
        bytes: payload, the larger side when dtypes differ.
        hbm_read, hbm_written: bytes that HBM delivers and takes.
        descriptors: contiguous pieces.
        trigger: who makes the descriptors: gpsimd (software), sync or scalar (hardware, by that sequencer), unknown
            (hardware, either sequencer), or dma (made before the kernel runs).
    """

    first_engine: int
    engines: int
    ns: float
    bytes: int
    hbm_read: int
    hbm_written: int
    descriptors: int
    trigger: engine


def transfer_of(call: Call, costs: Costs) -> Transfer:
    """What a DMA instruction moves.

    Raises:
        UnsupportedInstructionError: it has no rule.
    """
    name = call.name
    if name == "dma_copy":
        return transfer(call.argument("dst"), [call.argument("src")], costs, 1.0, _trigger(call))
    if name in ("dma_transpose", "load_transposed"):
        src, dst = call.argument("src"), call.argument("dst")
        rate = costs.dma_transpose_hbm if src.storage.region in HBM_REGIONS else costs.dma_transpose_sbuf
        return _transposing(dst, src, costs, rate, _trigger(call) if name == "dma_transpose" else engine.dma)
    if name == "dma_compute":
        trigger = engine.gpsimd if _is_indirect(call) else engine.dma
        return transfer(call.argument("dst"), call.argument("srcs"), costs, costs.dma_compute, trigger)
    if name == "fill":
        return transfer(call.argument("dst"), [call.argument("dst")], costs, 1.0, engine.dma)
    raise UnsupportedInstructionError(f"the cost model has no rule for {name}")


def transfer(dst: NkiTensor, srcs: Sequence[NkiTensor], costs: Costs, share: float, trigger: engine) -> Transfer:
    """A DMA from `srcs` to `dst` at `share` of the engines' rate."""
    written = dst.size * dst.dtype.itemsize
    read = [src.size * src.dtype.itemsize for src in srcs]
    run = min(contiguous_bytes(tensor) for tensor in (dst, *srcs))
    payload = max(written, sum(read))
    first, engines, part = _engines(dst if dst.on_chip else srcs[0], payload, costs)
    run = min(run, part)
    hbm_read = sum(size for size, src in zip(read, srcs, strict=True) if src.storage.region in HBM_REGIONS)
    hbm_written = written if dst.storage.region in HBM_REGIONS else 0
    ns = part / (costs.dma_bytes_per_ns * efficiency(run, costs) * share)
    ns = max(ns, (hbm_read + hbm_written) / costs.hbm_share)
    return Transfer(first, engines, ns, payload, hbm_read, hbm_written, -(-payload // run), trigger)


def _transposing(dst: NkiTensor, src: NkiTensor, costs: Costs, rate: float, trigger: engine) -> Transfer:
    """All engines write one [128, 16] tile at a time, whatever part of it is used."""
    size = dst.size * dst.dtype.itemsize
    free = dst.free_size if dst.on_chip else dst.shape[-1]
    padded = costs.array_size * (-(-free // 16) * 16) * dst.dtype.itemsize
    hbm = size if src.storage.region in HBM_REGIONS else 0
    ns = max(max(padded, size) / (costs.dma_peak * rate), hbm / costs.hbm_share)
    return Transfer(0, costs.dma_engines, ns, size, hbm, 0, -(-size // contiguous_bytes(src)), trigger)


def contiguous_bytes(tensor: NkiTensor) -> int:
    """Longest run of the view that is contiguous in memory; on chip, within a partition."""
    run = 1
    first = 1 if tensor.on_chip else 0
    for size, stride in zip(reversed(tensor.shape[first:]), reversed(tensor.strides[first:]), strict=True):
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run * tensor.dtype.itemsize


def efficiency(run: int, costs: Costs) -> float:
    """Share of an engine's rate with descriptors of `run` bytes: the documented curve, linear between its points."""
    left, low = 0, 0.0
    for right, high in costs.dma_efficiency:
        if run <= right:
            return low + (high - low) * (run - left) / (right - left)
        left, low = right, high
    return low


def _engines(tensor: NkiTensor, payload: int, costs: Costs) -> tuple[int, int, int]:
    """First engine, number of engines, and bytes that the busiest of them moves."""
    if tensor.on_chip:
        partitions = tensor.shape[0]
        first = tensor.partition // costs.dma_partitions
        last = (tensor.partition + partitions - 1) // costs.dma_partitions
        return first, last - first + 1, payload * min(costs.dma_partitions, partitions) // partitions
    engines = min(costs.dma_engines, -(-payload // costs.dma_packet_bytes))
    return 0, engines, -(-payload // engines)


def _is_indirect(call: Call) -> bool:
    return any(type(t) is GatheredTensor and t.storage.region in HBM_REGIONS for t in (*call.reads, *call.writes))


def _trigger(call: Call) -> engine:
    mode = call.argument("dge_mode")
    if mode is dge_mode.swdge or (mode is dge_mode.unknown and _is_indirect(call)):
        return engine.gpsimd
    if mode is dge_mode.hwdge or (mode is dge_mode.unknown and call.dynamic):
        found: engine = call.argument("engine") if call.name == "dma_copy" else engine.unknown
        return found
    return engine.dma


DMA_RULES = ("dma_compute", "dma_copy", "dma_transpose", "fill", "load_transposed")
