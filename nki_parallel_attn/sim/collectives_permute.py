"""The permutes: each rank sends to one rank and receives from one. Source: nki/api/nki/collectives/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .collective_checks import (
    channels,
    check_membership,
    check_shape,
    check_single,
    check_tensors,
    group_of_call,
    reduction,
    tensors_by_channel,
)
from .collective_meeting import Sources, meet, meet_ranks
from .enums import engine
from .instruction import Call, instruction
from .registers import VirtualRegister
from .replica_group import ReplicaGroup
from .tensor import NkiTensor


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
    check_single(call, srcs, dsts)
    check_tensors(call, srcs, dsts, hbm_only=True)
    check_shape(call, dsts[0], srcs[0].shape)
    if any(len(pair) != 2 for pair in source_target_pairs):
        call.fail("collective-permute-pattern", f"{source_target_pairs} are not (source, target) pairs")
    pairs = [(source, target) for source, target in source_target_pairs]
    senders, receivers = [s for s, _ in pairs], [t for _, t in pairs]
    call.require(
        len(set(senders)) == len(pairs) and sorted(senders) == sorted(receivers),
        "collective-permute-pattern",
        f"pairs {pairs}: every rank sends once and receives once",
    )
    ranks = tuple(sorted(senders))
    check_membership(call, ranks, "source_target_pairs")
    sender_of = {target: source for source, target in pairs}

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [sources[ranks.index(sender_of[ranks[index]])][0]]

    meet_ranks(call, ranks, srcs, dsts, combine, priority, source_target_pairs=pairs)


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
    srcs = tensors_by_channel(call, "srcs_by_channel", srcs_by_channel, channel_ids, replica_group)
    dsts = tensors_by_channel(call, "dsts_by_channel", dsts_by_channel, channel_ids, replica_group)
    check_tensors(call, srcs, dsts, hbm_only=True)
    for src, dst in zip(srcs, dsts, strict=True):
        check_shape(call, dst, src.shape)

    def combine(index: int, sources: Sources) -> Sequence[torch.Tensor]:
        return sources[index - 1]

    meet(call, replica_group, srcs, dsts, combine, priority, channel_ids=list(channel_ids))


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
    srcs0 = tensors_by_channel(call, "srcs0_by_channel", srcs0_by_channel, channel_ids, replica_group)
    srcs1 = tensors_by_channel(call, "srcs1_by_channel", srcs1_by_channel, channel_ids, replica_group)
    dsts = tensors_by_channel(call, "dsts_by_channel", dsts_by_channel, channel_ids, replica_group)
    check_tensors(call, srcs0, dsts, hbm_only=True)
    check_tensors(call, srcs1, dsts, hbm_only=True)
    for src0, src1, dst in zip(srcs0, srcs1, dsts, strict=True):
        check_shape(call, dst, src0.shape)
        check_shape(call, dst, src1.shape)
    reduce = reduction(call, op)
    formats = [src.format for src in srcs0]
    count = len(srcs0)

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        mine = sources[index - 1]
        return [reduce([mine[i], mine[count + i]], formats[i]) for i in range(count)]

    meet(call, replica_group, [*srcs0, *srcs1], dsts, combine, priority, op=op, channel_ids=list(channel_ids))


@instruction(engine=engine.sync)
def _processing_rank(
    call: Call, iteration_id: int, replica_group: ReplicaGroup, channel_id: int, register: VirtualRegister
) -> None:
    limit = channels(call, group_of_call(call, replica_group))
    if not 0 <= channel_id < limit:
        call.fail("collective-channels", f"channel_id is {channel_id}, the group has channels 0 to {limit - 1}")
    group = replica_group.group_of(call.core.rank.index)
    register.write(group[(group.index(call.core.rank.index) - iteration_id) % len(group)])


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """Register with the rank whose data this rank handles in a ring step: its own at 0, then its predecessors'."""
    register = VirtualRegister()
    _processing_rank(iteration_id, replica_group, channel_id, register)
    return register
