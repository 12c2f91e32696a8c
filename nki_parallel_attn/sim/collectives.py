"""nki.collectives: communication between ranks inside a kernel. Source: nki/api/nki/collectives/__init__.py.

Each function checks its call, then meets the other ranks with a pure function that says what every destination becomes.
Reductions are summed in float32 in rank-list order and rounded once. The forms with run-time sizes are in
collectives_v.py, the permutes in collectives_permute.py.
"""

from __future__ import annotations

from typing import Any

import torch

from .collective_checks import (
    check_dim,
    check_divides,
    check_shape,
    check_tensors,
    group_of_call,
    reduction,
    scaled,
)
from .collective_meeting import Sources, meet
from .collectives_permute import (
    collective_permute,
    collective_permute_implicit,
    collective_permute_implicit_current_processing_rank_id,
    collective_permute_implicit_reduce,
)
from .collectives_v import all_gather_v, all_to_all_v
from .enums import HBM_REGIONS, engine
from .instruction import Call, instruction
from .registers import VirtualRegister
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
    check_tensors(call, srcs, dsts)
    for src, dst in zip(srcs, dsts, strict=True):
        check_shape(call, dst, src.shape)
    reduce = reduction(call, op)
    formats = [src.format for src in srcs]

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [reduce([values[i] for values in sources], formats[i]) for i in range(len(srcs))]

    meet(call, replica_group, srcs, dsts, combine, priority, op=op)


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
    check_tensors(call, srcs, dsts)
    check_dim(call, collective_dim, (0,) if srcs[0].buffer in HBM_REGIONS else (0, 1))
    size = group_of_call(call, replica_group).group_size
    for src, dst in zip(srcs, dsts, strict=True):
        check_shape(call, dst, scaled(src.shape, collective_dim, size))

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [torch.cat([values[i] for values in sources], collective_dim) for i in range(len(srcs))]

    meet(call, replica_group, srcs, dsts, combine, priority, collective_dim=collective_dim)


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
    check_tensors(call, srcs, dsts)
    check_dim(call, collective_dim, (0,))
    size = group_of_call(call, replica_group).group_size
    for src, dst in zip(srcs, dsts, strict=True):
        check_divides(call, src, size)
        check_shape(call, dst, (src.shape[0] // size, *src.shape[1:]))
    reduce = reduction(call, op)
    formats = [src.format for src in srcs]

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [reduce([values[i].chunk(size)[index] for values in sources], formats[i]) for i in range(len(srcs))]

    meet(call, replica_group, srcs, dsts, combine, priority, collective_dim=collective_dim, op=op)


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
    check_tensors(call, srcs, dsts, hbm_only=True)
    check_dim(call, collective_dim, (0,))
    size = group_of_call(call, replica_group).group_size
    for src, dst in zip(srcs, dsts, strict=True):
        check_divides(call, src, size)
        check_shape(call, dst, src.shape)

    def combine(index: int, sources: Sources) -> list[torch.Tensor]:
        return [torch.cat([values[i].chunk(size)[index] for values in sources]) for i in range(len(srcs))]

    meet(call, replica_group, srcs, dsts, combine, priority, collective_dim=collective_dim)


@instruction(engine=engine.sync)
def _rank_id(call: Call, register: VirtualRegister) -> None:
    register.write(call.core.rank.index)


def rank_id(name: str | None = None) -> VirtualRegister:
    """Register with this rank's index in the world."""
    register = VirtualRegister()
    _rank_id(register)
    return register
