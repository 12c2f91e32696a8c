"""all_gather_v and all_to_all_v: chunks of run-time sizes. Source: nki/api/nki/collectives/__init__.py."""

from __future__ import annotations

import torch

from .collective_checks import check_single, check_tensors, group_of_call
from .collective_meeting import Sources, meet
from .enums import MemoryRegion, engine, nc_version
from .instruction import Call, instruction
from .replica_group import ReplicaGroup
from .tensor import NkiTensor


@instruction(
    engine=engine.dma, reads=("srcs", "metadata_tensor"), writes=("dsts", "metadata_tensor"), deferred_read=True
)
def all_gather_v(
    call: Call,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank of a list receives one chunk of each rank's source, into equal slots of dst.

    Args:
        metadata_tensor: uint32 [3, group size]; column 0 of rows 0 and 1 is what this rank sends and from where, row 2
            receives the counts unless recv_counts_known.
    """
    check_single(call, srcs, dsts)
    check_tensors(call, srcs, dsts, hbm_only=True)
    size = group_of_call(call, replica_group).group_size
    call.require(
        call.core.rank.lnc == 2 and size == 4 and not has_rdispls,
        "all-gather-v",
        f"LNC {call.core.rank.lnc}, rank lists of {size}, has_rdispls={has_rdispls}; "
        "expected LNC 2, lists of 4 ranks and no has_rdispls",
    )
    _check_metadata(call, metadata_tensor, size, rows=3)
    slot = dsts[0].size // size

    def combine(index: int, sources: Sources) -> list[torch.Tensor | None]:
        metadata = [_rows(values[1], size) for values in sources]
        chunks = [
            _chunk(call, values[0], int(rows[0, 0]), int(rows[1, 0]), slot)
            for values, rows in zip(sources, metadata, strict=True)
        ]
        return _received(dsts[0], chunks, [slot * i for i in range(size)], sources[index][1], recv_counts_known)

    call.marked = True
    meet(call, replica_group, [*srcs, metadata_tensor], [*dsts, metadata_tensor], combine, priority)


@instruction(
    engine=engine.dma, reads=("srcs", "metadata_tensor"), writes=("dsts", "metadata_tensor"), deferred_read=True
)
def all_to_all_v(
    call: Call,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank of a list receives its own chunk of each rank's source.

    Args:
        metadata_tensor: uint32 [3 or 4, group size], rows: counts to send, where from, counts received (written unless
            recv_counts_known), and with has_rdispls where chunks go; without, into equal slots of dst.
    """
    check_single(call, srcs, dsts)
    check_tensors(call, srcs, dsts, hbm_only=True)
    group = group_of_call(call, replica_group)
    size = group.group_size
    _check_all_to_all_v(call, group, has_rdispls)
    _check_metadata(call, metadata_tensor, size, rows=4 if has_rdispls else 3)
    slot = dsts[0].size // size

    def combine(index: int, sources: Sources) -> list[torch.Tensor | None]:
        metadata = [_rows(values[1], size) for values in sources]
        limit = dsts[0].size if has_rdispls else slot
        chunks = [
            _chunk(call, values[0], int(rows[0, index]), int(rows[1, index]), limit)
            for values, rows in zip(sources, metadata, strict=True)
        ]
        places = [int(v) for v in metadata[index][3]] if has_rdispls else [slot * i for i in range(size)]
        for place, chunk in zip(places, chunks, strict=True):
            if place + chunk.numel() > dsts[0].size:
                call.fail(
                    "collective-v-bounds", f"elements {place} to {place + chunk.numel() - 1} of dst {dsts[0].size}"
                )
        return _received(dsts[0], chunks, places, sources[index][1], recv_counts_known)

    call.marked = True
    meet(call, replica_group, [*srcs, metadata_tensor], [*dsts, metadata_tensor], combine, priority)


def _check_metadata(call: Call, metadata: NkiTensor, size: int, rows: int) -> None:
    shape = (1, rows, size) if metadata.buffer is MemoryRegion.sbuf else (rows, size)
    if metadata.dtype != "uint32" or metadata.shape != shape or not metadata.covers_storage:
        call.fail(
            "collective-v-metadata",
            f"metadata_tensor is {metadata.dtype} {list(metadata.shape)}, expected contiguous uint32 {list(shape)}",
        )


def _check_all_to_all_v(call: Call, group: ReplicaGroup, has_rdispls: bool) -> None:
    if not call.core.checks.collectives:
        return
    target, lnc = call.core.target, call.core.rank.lnc
    ranks = group.group_of(call.core.rank.index)
    if target.at_least(nc_version.gen4):
        per_chip = target.cores_per_chip // lnc
        whole = ranks == tuple(range(ranks[0], ranks[0] + len(ranks))) and len(ranks) % per_chip == 0
        call.require(
            lnc == 2 and whole and len(ranks) > per_chip,
            "all-to-all-v",
            f"LNC {lnc}, ranks {list(ranks)}; {target.name} takes LNC 2 and whole consecutive chips",
        )
    else:
        node = target.ranks_per_node(lnc)
        inter = len({rank % node for rank in ranks}) == 1
        call.require(
            inter and not has_rdispls,
            "all-to-all-v",
            f"ranks {list(ranks)}, has_rdispls={has_rdispls}; {target.name} takes same-indexed ranks of nodes "
            f"({node} ranks each) and no has_rdispls",
        )


def _rows(metadata: torch.Tensor, size: int) -> torch.Tensor:
    return metadata.reshape(-1, size).to(torch.int64)


def _chunk(call: Call, source: torch.Tensor, count: int, start: int, limit: int) -> torch.Tensor:
    if start + count > source.numel() or count > limit:
        call.fail(
            "collective-v-bounds",
            f"{count} elements from {start} of a source of {source.numel()}, into at most {limit}",
        )
    return source.reshape(-1)[start : start + count]


def _received(
    dst: NkiTensor, chunks: list[torch.Tensor], places: list[int], metadata: torch.Tensor, recv_counts_known: bool
) -> list[torch.Tensor | None]:
    """New contents of dst and, unless the counts are known, of the metadata. Marks what has been received."""
    flat = dst.raw.reshape(-1).clone()
    line = dst.reshape((dst.size,))
    for place, chunk in zip(places, chunks, strict=True):
        if chunk.numel():
            flat[place : place + chunk.numel()] = chunk
            line[place : place + chunk.numel()].mark_written()
    if recv_counts_known:
        return [flat, None]
    counts = metadata.clone().reshape(-1, len(chunks))
    counts[2] = torch.tensor([chunk.numel() for chunk in chunks]).to(counts.dtype)
    return [flat, counts]
