"""The torch process group of a rank list, made on first use and kept for the life of the default group."""

from __future__ import annotations

from weakref import WeakKeyDictionary

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
        groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[ranks]
