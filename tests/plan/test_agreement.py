"""JSON there and back, and what ranks with different plans are told."""

import json
import pickle

import pytest
from hypothesis import given, settings

from nki_parallel_attn import AttentionShape, Interleaved, RoundRobin, ShardingPlan
from nki_parallel_attn.errors import ArgumentError, PlanError, RankFailedError, RankMismatchError
from nki_parallel_attn.plan_agreement import as_dict, describe_differences
from nki_parallel_attn.testing import run_ranks

from .plans import plans

SHAPE = AttentionShape(q_heads=8, kv_heads=2, head_dim=64)


@settings(deadline=None, max_examples=100)
@given(plans())
def test_round_trip(plan):
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()
    assert pickle.loads(pickle.dumps(plan)) == plan


def changed_json(**changes):
    values = as_dict(ShardingPlan(SHAPE, world_size=4, cp=2, kv_layout=Interleaved(16)))
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        target, key = (values[outer], inner) if inner else (values, outer)
        if value is None:
            del target[key]
        else:
            target[key] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("{", "text"),
        ("[]", "text"),
        (None, "text"),
        (changed_json(schema=2), "schema"),
        (changed_json(schema=None), "schema"),
        (changed_json(tp=None), "tp"),
        (changed_json(extra=1), "extra"),
        (changed_json(shape__layers=None), "shape.layers"),
        (changed_json(shape__extra=1), "shape.extra"),
        (changed_json(shape=3), "shape"),
        (changed_json(kv_layout__kind="zigzag"), "kv_layout.kind"),
        (changed_json(kv_layout__kind=[]), "kv_layout.kind"),
        (changed_json(kv_layout__interleave=None), "kv_layout.interleave"),
        (changed_json(kv_layout={"kind": "round_robin", "interleave": 4}), "kv_layout.interleave"),
        (changed_json(kv_layout="round_robin"), "kv_layout.kind"),
        (changed_json(kvp="1"), "kvp"),
        (changed_json(shape__q_heads="8"), "q_heads"),
    ],
)
def test_bad_json(text, argument):
    with pytest.raises(ArgumentError) as error:
        ShardingPlan.from_json(text)
    assert error.value.argument == argument


def test_json_of_an_infeasible_plan_is_refused_by_its_rule():
    with pytest.raises(PlanError, match="tp divides world_size"):
        ShardingPlan.from_json(changed_json(tp=3))


def test_differences_name_the_minority_first():
    plans = [{"kvp": 4, "lnc": 2}, {"kvp": 4, "lnc": 2}, {"kvp": 2, "lnc": 2}]
    assert describe_differences([0, 1, 2], plans) == "kvp is 2 on ranks [2], 4 on ranks [0, 1]"
    assert describe_differences([5, 6, 7], plans[:2] + plans[:1]) == ""
    assert describe_differences([0, 1], [{"a": 1}, {"b": 1}]) == (
        "a is 1 on ranks [0], 'absent' on ranks [1]; b is 'absent' on ranks [0], 1 on ranks [1]"
    )


def verify_with(kvp_by_rank, layouts=None):
    import torch.distributed as dist

    rank = dist.get_rank()
    layout = (layouts or {}).get(rank, RoundRobin())
    ShardingPlan(SHAPE, world_size=4, kvp=kvp_by_rank[rank], kv_layout=layout, seg_size=512).verify()
    return rank


def test_equal_plans_verify_on_four_ranks():
    assert run_ranks(verify_with, 4, args=([2, 2, 2, 2],)) == [0, 1, 2, 3]


def test_a_different_plan_raises_on_every_rank_naming_rank_and_field():
    with pytest.raises(RankFailedError) as error:
        run_ranks(verify_with, 4, args=([2, 2, 4, 2],))
    assert sorted(error.value.exceptions) == [0, 1, 2, 3]
    for exception in error.value.exceptions.values():
        assert isinstance(exception, RankMismatchError)
        assert str(exception) == "plans differ across ranks: kvp is 4 on ranks [2], 2 on ranks [0, 1, 3]"


def verify_in_groups():
    import torch.distributed as dist

    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plan = ShardingPlan(SHAPE, world_size=4, kvp=2 if rank < 3 else 4)
    try:
        plan.verify(halves[rank // 2])
    except RankMismatchError as error:
        return str(error)
    return "agreed"


def test_verify_over_a_group_names_world_ranks():
    agreed, differ = ["agreed"] * 2, run_ranks(verify_in_groups, 4)[2:]
    assert run_ranks(verify_in_groups, 4)[:2] == agreed
    assert all("kvp is 2 on ranks [2], 4 on ranks [3]" in text for text in differ)
