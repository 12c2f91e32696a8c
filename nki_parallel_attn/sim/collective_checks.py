"""What a collective asks of its tensors, groups and dimensions. Source: nki/api/nki/collectives/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import location
from .enums import HBM_REGIONS, MemoryRegion
from .errors import ReplicaGroupError
from .instruction import Call
from .ops import Operator, add, as_operator, maximum, minimum
from .replica_group import ReplicaGroup
from .tensor import NkiTensor

_FUNCTIONS: dict[Operator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    add: torch.add,
    minimum: torch.minimum,
    maximum: torch.maximum,
}


def group_of_call(call: Call, replica_group: Any) -> ReplicaGroup:
    """`replica_group`, which lies within the world and has this rank."""
    if not isinstance(replica_group, ReplicaGroup):
        where = f"{location.show(call.location)}: {call.name}"
        raise ReplicaGroupError(f"{where}: replica_group is {replica_group!r}, expected a ReplicaGroup")
    check_membership(call, replica_group.ranks, f"replica_group {replica_group.groups}")
    return replica_group


def check_membership(call: Call, ranks: Sequence[int], argument: str) -> None:
    size, rank = call.core.world_size, call.core.rank.index
    where = f"{location.show(call.location)}: {call.name}"
    if max(ranks) >= size:
        raise ReplicaGroupError(f"{where}: rank {max(ranks)} of {argument} is outside the world of {size} ranks")
    if rank not in ranks:
        raise ReplicaGroupError(f"{where}: rank {rank} calls it but is not in {argument}")


def check_tensors(call: Call, srcs: list[NkiTensor], dsts: list[NkiTensor], hbm_only: bool = False) -> None:
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


def check_single(call: Call, srcs: list[NkiTensor], dsts: list[NkiTensor]) -> None:
    if len(srcs) != 1 or len(dsts) != 1:
        call.fail("collective-single", f"{len(srcs)} sources and {len(dsts)} destinations, expected one of each")


def check_dim(call: Call, dim: int, allowed: tuple[int, ...]) -> None:
    if dim not in allowed:
        call.fail("collective-dim", f"collective_dim is {dim!r}, expected one of {list(allowed)}")


def check_shape(call: Call, dst: NkiTensor, shape: tuple[int, ...]) -> None:
    if dst.shape != tuple(shape):
        call.fail("collective-shape", f"destination is {list(dst.shape)}, expected {list(shape)}")


def check_divides(call: Call, src: NkiTensor, size: int) -> None:
    if src.shape[0] % size:
        call.fail("collective-shape", f"source {list(src.shape)} does not divide into {size} parts along dim 0")


def scaled(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])


def channels(call: Call, group: ReplicaGroup) -> int:
    """How many channels a ring of the group has."""
    return 4 if group.group_size >= call.core.target.ranks_per_node(call.core.rank.lnc) else 2


def tensors_by_channel(
    call: Call, argument: str, lists: list[list[NkiTensor]], channel_ids: list[int], replica_group: ReplicaGroup
) -> list[NkiTensor]:
    group = group_of_call(call, replica_group)
    limit = channels(call, group)
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


def reduction(call: Call, op: Any) -> Callable[..., torch.Tensor]:
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
