"""How the ranks of a collective meet: with a signature to compare, and a pure function that makes the destinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .collective_checks import group_of_call
from .enums import nc_version
from .instruction import Call
from .rendezvous import Signature
from .replica_group import ReplicaGroup
from .tensor import NkiTensor

Sources = Sequence[Sequence[torch.Tensor]]
"""Of each rank of the list, what it brought."""


def meet(
    call: Call,
    replica_group: ReplicaGroup,
    sources: list[NkiTensor],
    destinations: list[NkiTensor],
    combine: Any,
    priority: int | None,
    **details: Any,
) -> None:
    group = group_of_call(call, replica_group)
    ranks = group.group_of(call.core.rank.index)
    meet_ranks(call, ranks, sources, destinations, combine, priority, replica_group=group.groups, **details)


def meet_ranks(
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
