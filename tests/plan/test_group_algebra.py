"""Who shares KV with whom, and which heads a rank has: the plan against the formulas of the design, rank by rank."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn import AttentionShape, ShardingPlan

from .plans import plans


def brute_force(plan, rank):
    """Replica, KV group and index of `rank`, its Q heads, and the KV heads that its group's Q heads read."""
    replica, t = divmod(rank, plan.tp)
    group_size = plan.kvp * plan.kvdp * plan.cp
    groups = plan.tp // group_size
    group, index = (t // group_size, t % group_size) if plan.rank_order == "consecutive" else (t % groups, t // groups)
    per_rank = plan.shape.q_heads // plan.tp
    q_heads = range((group * group_size + index) * per_rank, (group * group_size + index + 1) * per_rank)
    group_q_heads = range(group * group_size * per_rank, (group + 1) * group_size * per_rank)
    queries_per_kv_head = plan.shape.q_heads // plan.shape.kv_heads
    kv_heads = sorted({head // queries_per_kv_head for head in group_q_heads})
    return replica, group, index, q_heads, kv_heads


@settings(deadline=None, max_examples=60)
@given(plans())
def test_every_rank_against_the_formulas(plan):
    members = {}
    for rank in range(plan.world_size):
        replica, group, index, q_heads, kv_heads = brute_force(plan, rank)
        view = plan.rank(rank)
        assert (view.coordinates["replica"], view.kv_group, view.index) == (replica, group, index)
        assert view.q_heads == q_heads
        assert list(view.kv_heads) == kv_heads and len(kv_heads) == plan.kv_heads_per_rank
        assert index == view.coordinates["kvp"] + view.coordinates["cp"] * plan.kvdp + view.coordinates["kvdp"]
        assert view.sequence_index == (index if plan.kvp > 1 else index // plan.kvdp)
        members.setdefault((replica, group), []).append((index, rank))
    expected = {tuple(rank for _, rank in sorted(ranks)) for ranks in members.values()}
    assert set(plan.replica_group("kv").groups) == expected
    assert plan.kv_groups * plan.replicas == len(expected)


@settings(deadline=None, max_examples=60)
@given(plans(), st.data())
def test_groups_of_each_kind(plan, data):
    ranks = data.draw(st.lists(st.integers(0, plan.world_size - 1), min_size=1, max_size=8))
    for kind in ("kv", "kvp", "kvdp", "cp", "tp", "replica", "kv_group"):
        group = plan.replica_group(kind)
        assert group.ranks == tuple(range(plan.world_size))
        for rank in ranks:
            mine = plan.rank(rank).group_ranks(kind)
            assert mine in group.groups and rank in mine
            assert list(mine) == sorted(mine)
            axes = plan.axes_of(kind)
            coordinates = [plan.rank(other).coordinates for other in mine]
            assert all(
                one[name] == coordinates[0][name] for one in coordinates for name in plan.mesh.names if name not in axes
            )
    for rank in ranks:
        kvdp = plan.rank(rank).group_ranks("kvdp")
        assert [plan.rank(other).coordinates["kvdp"] for other in kvdp] == list(range(plan.kvdp))
        cp = plan.rank(rank).group_ranks("cp")
        assert [plan.rank(other).coordinates["cp"] for other in cp] == list(range(plan.cp))


@settings(deadline=None, max_examples=60)
@given(plans())
def test_a_model_copy_covers_its_heads_once(plan):
    q_heads = sorted(head for rank in range(plan.tp) for head in plan.rank(rank).q_heads)
    assert q_heads == list(range(plan.shape.q_heads))
    assert {head for rank in range(plan.tp) for head in plan.rank(rank).kv_heads} == set(range(plan.shape.kv_heads))


def test_gathered_heads_of_a_group_are_consecutive_in_index_order():
    """attention_block_tkg orders gathered heads cp*(q_heads*KVDP) + kvdp*q_heads + h; so must the plan."""
    for order in ("consecutive", "strided"):
        plan = ShardingPlan(AttentionShape(32, 2, 64), world_size=16, kvdp=2, cp=4, rank_order=order)
        for ranks in plan.replica_group().groups:
            heads = [head for rank in ranks for head in plan.rank(rank).q_heads]
            assert heads == list(range(heads[0], heads[0] + 16))
            places = [plan.rank(rank).coordinates for rank in ranks]
            assert [(c["cp"], c["kvdp"]) for c in places] == [(cp, kvdp) for cp in range(4) for kvdp in range(2)]


def test_both_rank_orders_by_hand():
    shape = AttentionShape(q_heads=8, kv_heads=2, head_dim=64)
    consecutive = ShardingPlan(shape, world_size=8, tp=4, kvp=2)
    assert consecutive.replica_group().groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert [view.q_heads.start for view in map(consecutive.rank, range(8))] == [0, 2, 4, 6, 0, 2, 4, 6]
    strided = ShardingPlan(shape, world_size=8, tp=4, kvp=2, rank_order="strided")
    assert strided.replica_group().groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert [view.q_heads.start for view in map(strided.rank, range(8))] == [0, 4, 2, 6, 0, 4, 2, 6]
    assert [view.kv_heads.start for view in map(strided.rank, range(8))] == [0, 1, 0, 1, 0, 1, 0, 1]


def test_defaults():
    plan = ShardingPlan(AttentionShape(8, 2, 64), world_size=4, kvp=2, block_size=16)
    assert (plan.tp, plan.seg_size, plan.replicas) == (4, 32, 1)
    assert plan == ShardingPlan(AttentionShape(8, 2, 64), world_size=4, tp=4, kvp=2, block_size=16, seg_size=32)
    assert len({plan, ShardingPlan(AttentionShape(8, 2, 64), world_size=4, kvp=2, block_size=16)}) == 1


def test_a_world_of_4096_ranks_is_quick():
    plan = ShardingPlan(AttentionShape(128, 8, 128), world_size=4096, tp=128, kvp=16, rank_order="strided")
    start = time.process_time()
    groups = plan.replica_group()
    views = [plan.rank(rank) for rank in range(plan.world_size)]
    heads = [view.q_heads.start for view in views]
    assert time.process_time() - start < 2
    assert len(groups.groups) == 256 and sorted(heads) == sorted(list(range(128)) * 32)
