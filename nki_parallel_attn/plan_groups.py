"""The torch process groups of a plan, made once per plan and process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from nki_parallel_attn.backends.process_groups import process_group_for
from nki_parallel_attn.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from nki_parallel_attn.plan import ShardingPlan


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's process group of each kind; ranks in each are in index order.

    Attributes:
        kv: all ranks that share KV with this one (kvp, or kvdp*cp of them).
        kvdp: those that share it by batch.
        cp: those that share it by sequence.
        tp: the ranks of this rank's model copy.
        replica: the ranks in the same place of every model copy.
    """

    kv: ProcessGroup
    kvdp: ProcessGroup
    cp: ProcessGroup
    tp: ProcessGroup
    replica: ProcessGroup


# By plan, with the default group they belong to: a later job in the same process gets new ones.
_made: dict[ShardingPlan, tuple[ProcessGroup, ProcessGroups]] = {}


def process_groups(plan: ShardingPlan) -> ProcessGroups:
    """The groups of `plan` on this rank.

    Every rank of the world calls this, each making only the groups it belongs to, kind by kind in the same order;
    kinds with the same ranks share one group.

    Raises:
        PlanError: no default process group, or one of another size than the plan's world.
    """
    if not dist.is_initialized():
        raise PlanError("process_groups needs torch.distributed.init_process_group", "no default process group")
    world = dist.group.WORLD
    if dist.get_world_size() != plan.world_size:
        raise PlanError(
            "world_size is the number of running ranks", f"world_size={plan.world_size}, {dist.get_world_size()} ranks"
        )
    assert world is not None
    if any(made_for is not world for made_for, _ in _made.values()):
        _made.clear()
    if plan in _made:
        return _made[plan][1]
    view = plan.rank(dist.get_rank())
    groups: dict[str, ProcessGroup] = {}
    for kind in ("kv", "kvdp", "cp", "tp", "replica"):
        group = process_group_for(view.group_ranks(kind))
        assert group is not None  # torch.distributed is initialised
        groups[kind] = group
    made = ProcessGroups(**groups)
    _made[plan] = (world, made)
    return made
