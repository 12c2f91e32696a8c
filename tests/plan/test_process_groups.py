"""Torch process groups and the DeviceMesh of a plan, on real ranks."""

import pytest

from nki_parallel_attn import AttentionShape, ShardingPlan
from nki_parallel_attn.errors import ArgumentError, PlanError
from nki_parallel_attn.testing import run_ranks

SHAPE = AttentionShape(q_heads=8, kv_heads=2, head_dim=64)
KINDS = ("kv", "kvdp", "cp", "tp", "replica")


def describe_groups(arguments):
    """Per kind: the group's ranks, and the sum of ranks that an all-reduce over it gives."""
    import torch
    import torch.distributed as dist

    plan = ShardingPlan(SHAPE, **arguments)
    groups = plan.process_groups()
    assert ShardingPlan(SHAPE, **arguments).process_groups() is groups
    found = {}
    for kind in KINDS:
        group = getattr(groups, kind)
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        found[kind] = (tuple(dist.get_process_group_ranks(group)), int(total))
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        {"world_size": 4, "kvp": 4},
        {"world_size": 8, "tp": 4, "kvp": 2, "rank_order": "strided"},
        {"world_size": 8, "kvdp": 2, "cp": 2},
        {"world_size": 4},
    ],
)
def test_every_rank_gets_its_groups(arguments):
    plan = ShardingPlan(SHAPE, **arguments)
    for rank, found in enumerate(run_ranks(describe_groups, plan.world_size, args=(arguments,))):
        for kind in KINDS:
            expected = plan.rank(rank).group_ranks(kind)
            assert found[kind] == (expected, sum(expected))


def test_groups_are_made_anew_for_a_new_job():
    for _ in range(2):
        assert run_ranks(describe_groups, 2, args=({"world_size": 2, "kvp": 2},))[1]["kv"] == ((0, 1), 1)


def groups_of_a_wrong_world():
    with pytest.raises(PlanError, match="world_size is the number of running ranks; got world_size=4, 2 ranks"):
        ShardingPlan(SHAPE, world_size=4).process_groups()


def test_a_wrong_world_raises_on_every_rank():
    run_ranks(groups_of_a_wrong_world, 2)


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(PlanError, match="init_process_group"):
        ShardingPlan(SHAPE, world_size=4).process_groups()


def mesh_groups(arguments):
    """Axis names and sizes of the DeviceMesh, its replica groups by axis, and a bad name's error."""
    from nki_parallel_attn.integrations.device_mesh import replica_group

    plan = ShardingPlan(SHAPE, **arguments)
    mesh = plan.device_mesh()
    names = mesh.mesh_dim_names
    for name in names:
        assert replica_group(mesh, name) == plan.replica_group(name)
        assert mesh.get_local_rank(name) == plan.rank(mesh.get_rank()).coordinates[name]
    assert replica_group(mesh, *names) == plan.mesh.groups(*names)
    assert replica_group(mesh) == plan.mesh.groups()
    with pytest.raises(ArgumentError, match="dims: got 'dp'"):
        replica_group(mesh, "dp")
    return names, tuple(mesh.mesh.shape)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"world_size": 8, "tp": 4, "kvp": 2, "rank_order": "strided"}, (("replica", "kvp", "kv_group"), (2, 2, 2))),
        ({"world_size": 8, "kvdp": 2, "cp": 4}, (("cp", "kvdp"), (4, 2))),
        ({"world_size": 1}, (("replica",), (1,))),
    ],
)
def test_device_mesh(arguments, expected):
    assert run_ranks(mesh_groups, arguments["world_size"], args=(arguments,)) == [expected] * arguments["world_size"]
