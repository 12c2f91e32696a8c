"""The torch process group of a rank list, made on first use and kept for the life of the default group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError

_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def process_group_for(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of these world ranks, ascending; None for one rank without torch.distributed.

    The first call for a list is a collective of its ranks and of no others.

    Raises:
        ArgumentError: several ranks, but torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if ranks == (0,):
            return None
        raise ArgumentError("replica_groups", f"ranks {list(ranks)}", "rank 0 alone", "init_process_group comes first")
    world = dist.group.WORLD
    assert world is not None
    if ranks == tuple(range(dist.get_world_size())):
        return world
    groups = _made.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = _new_group(ranks, world)
    return groups[ranks]


def _new_group(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """dist.new_group, called by the members only, with the timeout of the default group.

    torch names such a group by its ranks and by how many groups a process has, so members with different numbers of
    groups would look for each other under different names for ever. Here the name counts the groups of these ranks.
    """
    c10d: Any = dist.distributed_c10d
    joined = "_".join(map(str, ranks))
    count = c10d._get_default_store().add(f"nki_parallel_attn/groups/{joined}/{dist.get_rank()}", 1)
    name_of = c10d._process_group_name

    def name(asked: Sequence[int], use_hashed_name: bool) -> str:
        own = tuple(asked) == ranks
        return f"nki_parallel_attn_{joined}_{count}" if own else str(name_of(asked, use_hashed_name))

    c10d._process_group_name = name
    try:
        group: dist.ProcessGroup = dist.new_group(list(ranks), _timeout(world), use_local_synchronization=True)
    finally:
        c10d._process_group_name = name_of
    return group


def _timeout(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device(group._device_types[0])).options._timeout
    return timeout
