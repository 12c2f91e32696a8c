"""nki.collectives: communication between ranks inside a kernel. Source: nki/api/nki/collectives/__init__.py.

Each function checks its call, then meets the other ranks (rendezvous.py) with a pure function that says what every
destination becomes. Reductions are summed in float32 in rank-list order and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import location
from .enums import HBM_REGIONS, MemoryRegion, engine, nc_version
from .errors import ReplicaGroupError
from .instruction import Call, instruction
from .ops import Operator, add, as_operator, maximum, minimum
from .registers import VirtualRegister
from .rendezvous import Signature
from .replica_group import ReplicaGroup, rg_partition_op
from .tensor import NkiTensor

__all__ = [
    "ReplicaGroup",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce",
    "rank_id",
    "reduce_scatter",
    "rg_partition_op",
]

Sources = Sequence[Sequence[torch.Tensor]]
_FUNCTIONS: dict[Operator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    add: torch.add,
    minimum: torch.minimum,
    maximum: torch.maximum,
}


@instruction(engine=engine.dma, reads=("srcs",), writes=("dsts",), deferred_read=True)
def all_reduce(
    call: Call,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank of a list receives the element-wise reduction of the list's sources."""
    _check_tensors(call, srcs, dsts)
    for src, dst in zip(srcs, dsts, strict=True):
        _check_shape(call, dst, src.shape)
    reduce = _reduction(call, op)
    formats = [src.format for src in srcs]

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [reduce([values[i] for values in sources], formats[i]) for i in range(len(srcs))]

    _meet(call, replica_group, srcs, dsts, combine, priority, op=op)


@instruction(engine=engine.dma, reads=("srcs",), writes=("dsts",), deferred_read=True)
def all_gather(
    call: Call,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank of a list receives the list's sources, concatenated along `collective_dim`."""
    _check_tensors(call, srcs, dsts)
    _check_dim(call, collective_dim, (0,) if srcs[0].buffer in HBM_REGIONS else (0, 1))
    size = _group(call, replica_group).group_size
    for src, dst in zip(srcs, dsts, strict=True):
        _check_shape(call, dst, _scaled(src.shape, collective_dim, size))

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [torch.cat([values[i] for values in sources], collective_dim) for i in range(len(srcs))]

    _meet(call, replica_group, srcs, dsts, combine, priority, collective_dim=collective_dim)


@instruction(engine=engine.dma, reads=("srcs",), writes=("dsts",), deferred_read=True)
def reduce_scatter(
    call: Call,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Rank i of a list receives part i, along dim 0, of the reduction of the list's sources."""
    _check_tensors(call, srcs, dsts)
    _check_dim(call, collective_dim, (0,))
    size = _group(call, replica_group).group_size
    for src, dst in zip(srcs, dsts, strict=True):
        _check_divides(call, src, size)
        _check_shape(call, dst, (src.shape[0] // size, *src.shape[1:]))
    reduce = _reduction(call, op)
    formats = [src.format for src in srcs]

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [reduce([values[i].chunk(size)[index] for values in sources], formats[i]) for i in range(len(srcs))]

    _meet(call, replica_group, srcs, dsts, combine, priority, collective_dim=collective_dim, op=op)


@instruction(engine=engine.dma, reads=("srcs",), writes=("dsts",), deferred_read=True)
def all_to_all(
    call: Call,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Rank i of a list receives part i, along dim 0, of every rank's source, concatenated in rank-list order."""
    _check_tensors(call, srcs, dsts, hbm_only=True)
    _check_dim(call, collective_dim, (0,))
    size = _group(call, replica_group).group_size
    for src, dst in zip(srcs, dsts, strict=True):
        _check_divides(call, src, size)
        _check_shape(call, dst, src.shape)

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [torch.cat([values[i].chunk(size)[index] for values in sources]) for i in range(len(srcs))]

    _meet(call, replica_group, srcs, dsts, combine, priority, collective_dim=collective_dim)


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
    _check_single(call, srcs, dsts)
    _check_tensors(call, srcs, dsts, hbm_only=True)
    size = _group(call, replica_group).group_size
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
    _meet(call, replica_group, [*srcs, metadata_tensor], [*dsts, metadata_tensor], combine, priority)


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
    _check_single(call, srcs, dsts)
    _check_tensors(call, srcs, dsts, hbm_only=True)
    group = _group(call, replica_group)
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
    _meet(call, replica_group, [*srcs, metadata_tensor], [*dsts, metadata_tensor], combine, priority)


@instruction(engine=engine.dma, reads=("srcs",), writes=("dsts",), deferred_read=True)
def collective_permute(
    call: Call,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    source_target_pairs: list[tuple[int, int]],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each target of a (source, target) pair receives the source's tensor. The pairs form circles."""
    _check_single(call, srcs, dsts)
    _check_tensors(call, srcs, dsts, hbm_only=True)
    _check_shape(call, dsts[0], srcs[0].shape)
    pairs = [(int(source), int(target)) for source, target in source_target_pairs]
    senders, receivers = [s for s, _ in pairs], [t for _, t in pairs]
    call.require(
        len(set(senders)) == len(pairs) and sorted(senders) == sorted(receivers),
        "collective-permute-pattern",
        f"pairs {pairs}: every rank sends once and receives once",
    )
    ranks = tuple(sorted(senders))
    _check_membership(call, ranks, "source_target_pairs")
    sender_of = {target: source for source, target in pairs}

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [sources[ranks.index(sender_of[ranks[index]])][0]]

    _meet_ranks(call, ranks, srcs, dsts, combine, priority, source_target_pairs=pairs)


@instruction(engine=engine.dma, reads=("srcs_by_channel",), writes=("dsts_by_channel",), deferred_read=True)
def collective_permute_implicit(
    call: Call,
    srcs_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    channel_ids: list[int] = [0],  # noqa: B006 - the documented default; never changed
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each rank of a ring sends to its successor and receives from its predecessor, on every channel."""
    srcs = _channels(call, "srcs_by_channel", srcs_by_channel, channel_ids, replica_group)
    dsts = _channels(call, "dsts_by_channel", dsts_by_channel, channel_ids, replica_group)
    _check_tensors(call, srcs, dsts, hbm_only=True)
    for src, dst in zip(srcs, dsts, strict=True):
        _check_shape(call, dst, src.shape)

    def combine(index: int, sources: Sources) -> Sequence[torch.Tensor]:
        return sources[index - 1]

    _meet(call, replica_group, srcs, dsts, combine, priority, channel_ids=list(channel_ids))


@instruction(
    engine=engine.dma, reads=("srcs0_by_channel", "srcs1_by_channel"), writes=("dsts_by_channel",), deferred_read=True
)
def collective_permute_implicit_reduce(
    call: Call,
    srcs0_by_channel: list[list[NkiTensor]],
    srcs1_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    op: Any,
    channel_ids: list[int] = [0],  # noqa: B006 - the documented default; never changed
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """As collective_permute_implicit; each rank sends op(srcs0, srcs1)."""
    srcs0 = _channels(call, "srcs0_by_channel", srcs0_by_channel, channel_ids, replica_group)
    srcs1 = _channels(call, "srcs1_by_channel", srcs1_by_channel, channel_ids, replica_group)
    dsts = _channels(call, "dsts_by_channel", dsts_by_channel, channel_ids, replica_group)
    _check_tensors(call, srcs0, dsts, hbm_only=True)
    _check_tensors(call, srcs1, dsts, hbm_only=True)
    for src0, src1, dst in zip(srcs0, srcs1, dsts, strict=True):
        _check_shape(call, dst, src0.shape)
        _check_shape(call, dst, src1.shape)
    reduce = _reduction(call, op)
    formats = [src.format for src in srcs0]
    count = len(srcs0)

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        mine = sources[index - 1]
        return [reduce([mine[i], mine[count + i]], formats[i]) for i in range(count)]

    _meet(call, replica_group, [*srcs0, *srcs1], dsts, combine, priority, op=op, channel_ids=list(channel_ids))


@instruction(engine=engine.sync)
def _processing_rank(call: Call, iteration_id: int, replica_group: ReplicaGroup, register: VirtualRegister) -> None:
    group = _group(call, replica_group).group_of(call.core.rank.index)
    register.write(group[(group.index(call.core.rank.index) - iteration_id) % len(group)])


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """Register with the rank whose data this rank handles in a ring step: its own at 0, then its predecessors'."""
    register = VirtualRegister()
    _processing_rank(iteration_id, replica_group, register)
    return register


@instruction(engine=engine.sync)
def _rank_id(call: Call, register: VirtualRegister) -> None:
    register.write(call.core.rank.index)


def rank_id(name: str | None = None) -> VirtualRegister:
    """Register with this rank's index in the world."""
    register = VirtualRegister()
    _rank_id(register)
    return register


# Meeting.


def _group(call: Call, replica_group: ReplicaGroup) -> ReplicaGroup:
    """`replica_group`, which lies within the world and has this rank."""
    _check_membership(call, replica_group.ranks, f"replica_group {replica_group.groups}")
    return replica_group


def _check_membership(call: Call, ranks: Sequence[int], argument: str) -> None:
    size, rank = call.core.world_size, call.core.rank.index
    where = f"{location.show(call.location)}: {call.name}"
    if max(ranks) >= size:
        raise ReplicaGroupError(f"{where}: rank {max(ranks)} of {argument} is outside the world of {size} ranks")
    if rank not in ranks:
        raise ReplicaGroupError(f"{where}: rank {rank} calls it but is not in {argument}")


def _meet(
    call: Call,
    replica_group: ReplicaGroup,
    sources: list[NkiTensor],
    destinations: list[NkiTensor],
    combine: Any,
    priority: int | None,
    **details: Any,
) -> None:
    group = _group(call, replica_group)
    ranks = group.group_of(call.core.rank.index)
    _meet_ranks(call, ranks, sources, destinations, combine, priority, replica_group=group.groups, **details)


def _meet_ranks(
    call: Call,
    ranks: tuple[int, ...],
    sources: list[NkiTensor],
    destinations: list[NkiTensor],
    combine: Any,
    priority: int | None,
    **details: Any,
) -> None:
    if priority is not None:
        call.require_target(nc_version.gen4, "priority")
        call.require(priority in (0, 1, 2, 3), "dma-mode", f"priority is {priority!r}, expected 0 to 3")
    shapes = [(*t.shape, str(t.dtype)) for t in sources], [(*t.shape, str(t.dtype)) for t in destinations]
    details = {"srcs": shapes[0], "dsts": shapes[1], **details}
    signature = Signature(call.name, tuple((name, str(value)) for name, value in details.items()))
    call.work["collective"] = {
        "ranks": ranks,
        "sent": [t.size * t.dtype.itemsize for t in sources],
        "received": [t.size * t.dtype.itemsize for t in destinations],
    }

    def check() -> None:
        if call.core.checks.uninitialised:
            for index, tensor in enumerate(sources):
                if not tensor.storage.full:
                    call.check_written(f"source {index}", tensor)

    call.meeting = call.core.world.meet(call.core, ranks, signature, sources, destinations, combine, check)


# Checks.


def _check_tensors(call: Call, srcs: list[NkiTensor], dsts: list[NkiTensor], hbm_only: bool = False) -> None:
    if len(srcs) != len(dsts) or not srcs:
        call.fail(
            "collective-list", f"{len(srcs)} sources and {len(dsts)} destinations, expected as many, at least one"
        )
    for src, dst in zip(srcs, dsts, strict=True):
        if src.dtype != dst.dtype:
            call.fail("collective-dtype", f"source is {src.dtype}, destination {dst.dtype}")
    if not call.core.checks.collectives:
        return
    tensors = [*srcs, *dsts]
    regions = {t.buffer for t in tensors}
    in_hbm = [t.buffer in HBM_REGIONS for t in tensors]
    if hbm_only and not all(in_hbm):
        call.fail("collective-hbm-only", f"tensors are in {_names(regions)}, expected HBM")
    if any(in_hbm) and not all(in_hbm):
        call.fail("collective-memory-mix", f"tensors are in {_names(regions)}, expected all in HBM or all in SBUF")
    if not any(in_hbm):
        if len(srcs) > 1:
            call.fail("collective-sbuf-coalesced", f"{len(srcs)} SBUF tensors in one call, expected one")
        for t in tensors:
            if t.ndim != 2:
                call.fail("collective-sbuf-rank", f"SBUF tensor {list(t.shape)}, expected 2 dimensions")
        return
    if len(srcs) > 1:
        if len(regions) > 1:
            call.fail("collective-hbm-kind", f"tensors of one call are in {_names(regions)}, expected one of them")
        if call.core.rank.lnc == 1 and regions == {MemoryRegion.shared_hbm}:
            call.fail("collective-hbm-kind", "several shared HBM tensors at LNC 1, expected private ones")
    for t in tensors:
        if t.storage.role == "input":
            call.fail(
                "collective-kernel-io", f"{t.name} is an argument of the kernel; copy it to a tensor of the kernel"
            )
        t.storage.communicated = True


def _check_single(call: Call, srcs: list[NkiTensor], dsts: list[NkiTensor]) -> None:
    if len(srcs) != 1 or len(dsts) != 1:
        call.fail("collective-single", f"{len(srcs)} sources and {len(dsts)} destinations, expected one of each")


def _check_dim(call: Call, dim: int, allowed: tuple[int, ...]) -> None:
    if dim not in allowed:
        call.fail("collective-dim", f"collective_dim is {dim!r}, expected one of {list(allowed)}")


def _check_shape(call: Call, dst: NkiTensor, shape: tuple[int, ...]) -> None:
    if dst.shape != tuple(shape):
        call.fail("collective-shape", f"destination is {list(dst.shape)}, expected {list(shape)}")


def _check_divides(call: Call, src: NkiTensor, size: int) -> None:
    if src.shape[0] % size:
        call.fail("collective-shape", f"source {list(src.shape)} does not divide into {size} parts along dim 0")


def _scaled(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])


def _channels(
    call: Call, argument: str, lists: list[list[NkiTensor]], channel_ids: list[int], replica_group: ReplicaGroup
) -> list[NkiTensor]:
    group = _group(call, replica_group)
    nodes = call.core.target.ranks_per_node(call.core.rank.lnc)
    limit = 4 if group.group_size >= nodes else 2
    if list(channel_ids) != list(range(len(channel_ids))) or len(lists) != len(channel_ids) or len(lists) > limit:
        call.fail(
            "collective-channels",
            f"{len(lists)} lists in {argument} and channel_ids {list(channel_ids)}, expected channels 0, 1, ... "
            f"with one list each, at most {limit} for groups of {group.group_size} ranks",
        )
    for tensors in lists:
        if len(tensors) != 1:
            call.fail("collective-single", f"{len(tensors)} tensors for one channel in {argument}, expected one")
    return [tensors[0] for tensors in lists]


def _reduction(call: Call, op: Any) -> Callable[..., torch.Tensor]:
    operator = as_operator(op)
    function = _FUNCTIONS.get(operator)
    if function is None:
        call.fail("collective-op", f"op is {operator!r}, expected nl.add, nl.minimum or nl.maximum")

    def reduce(values: list[torch.Tensor], format: Any) -> torch.Tensor:
        total = format.decode(values[0])
        for value in values[1:]:
            total = function(total, format.decode(value))
        encoded: torch.Tensor = format.encode(total)
        return encoded

    return reduce


def _names(regions: set[MemoryRegion]) -> str:
    return " and ".join(sorted(region.value for region in regions))


# The v forms.


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
