"""Which plans are refused, by what rule, and whether the offered values would have been accepted."""

import dataclasses
import re
import time

import pytest
from hypothesis import given, settings

from nki_parallel_attn import AttentionShape, Contiguous, Interleaved, RoundRobin, ShardingPlan
from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, PlanError
from nki_parallel_attn.plan_feasibility import check_feasible, with_values

from .plans import RANK_ORDERS, feasible_arguments, requests

LAYOUT_NAMES = {"RoundRobin": RoundRobin, "Contiguous": Contiguous, "Interleaved": Interleaved}
SHAPE = AttentionShape(q_heads=32, kv_heads=8, head_dim=128)


def is_feasible(r):
    """The design's conditions, written once more without their order or their words."""
    tp = r.world_size if r.tp is None else r.tp
    sizes = [r.world_size, tp, r.kvp, r.kvdp, r.cp, r.block_size]
    sizes += [size for size in (r.seg_size, r.max_seq_len) if size is not None]
    if min(sizes) < 1 or r.lnc not in (1, 2) or r.target not in ("trn2", "trn3") or r.rank_order not in RANK_ORDERS:
        return False
    group, decode = r.kvp * r.kvdp * r.cp, r.kvdp * r.cp > 1
    if r.world_size % tp or r.shape.q_heads % tp or tp % group or (r.kvp > 1 and decode):
        return False
    if r.shape.kv_heads % (tp // group) and (tp // group) % r.shape.kv_heads:
        return False
    if r.shape.head_dim > 128 or (decode and r.shape.head_dim % 2):
        return False
    if r.shape.hidden is not None and r.shape.hidden % r.lnc:
        return False
    if isinstance(r.kv_layout, Interleaved) and (
        r.kvp > 1 or r.kv_layout.interleave < 1 or r.block_size % r.kv_layout.interleave
    ):
        return False
    return r.seg_size is None or r.seg_size % r.block_size == 0


def parse(name, text):
    """A value as `nearest` shows it, back to what the constructor takes."""
    if name == "kv_layout":
        layout, interleave = re.fullmatch(r"(\w+)\((?:interleave=(\d+))?\)", str(text)).groups()
        return LAYOUT_NAMES[layout](*([int(interleave)] if interleave else []))
    return int(text) if str(text).isdigit() else text


def offers(nearest):
    """Each offer of `nearest` as a change of parameters."""
    for names, values in nearest.items():
        for value in values:
            if ", " in names:
                parts = value[1:-1].split(", ")
                yield {name: parse(name, part) for name, part in zip(names.split(", "), parts, strict=True)}
            else:
                yield {names: parse(names, value)}


@settings(deadline=None, max_examples=400)
@given(requests())
def test_exactly_the_infeasible_are_refused_with_feasible_offers(request):
    arguments = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    if is_feasible(request):
        ShardingPlan(**arguments)
        return
    start = time.process_time()
    with pytest.raises(PlanError) as error:
        ShardingPlan(**arguments)
    assert time.process_time() - start < 2
    assert error.value.rule in str(error.value)
    found = list(offers(error.value.nearest))
    assert found, error.value
    for change in found:
        assert is_feasible(with_values(request, change)), (str(error.value), change)
        check_feasible(with_values(request, change))


@settings(deadline=None, max_examples=100)
@given(feasible_arguments())
def test_feasible_by_construction(arguments):
    plan = ShardingPlan(**arguments)
    assert all(getattr(plan, name) == value for name, value in arguments.items())


@pytest.mark.parametrize(
    ("changes", "rule", "nearest"),
    [
        ({"world_size": 0}, "world_size >= 1", {"world_size": [1]}),
        ({"tp": 0}, "tp >= 1", {"tp": [1]}),
        ({"kvp": 0}, "kvp >= 1", {"kvp": [1]}),
        ({"kvdp": -1}, "kvdp >= 1", {"kvdp": [1]}),
        ({"cp": 0}, "cp >= 1", {"cp": [1]}),
        ({"block_size": 0}, "block_size >= 1", {"block_size": [1]}),
        ({"seg_size": 0}, "seg_size >= 1", {"seg_size": [128]}),
        ({"max_seq_len": 0}, "max_seq_len >= 1", {"max_seq_len": [1]}),
        ({"lnc": 4}, "lnc is 1 or 2", {"lnc": [2]}),
        ({"lnc": 0}, "lnc is 1 or 2", {"lnc": [1]}),
        ({"target": "trn1"}, "target is trn2 or trn3", {"target": ["trn2", "trn3"]}),
        ({"rank_order": "x"}, "rank_order is consecutive or strided", {"rank_order": ["consecutive", "strided"]}),
        ({"world_size": 12, "tp": 8}, "tp divides world_size", {"tp": [4], "world_size": [8, 16]}),
        ({"world_size": 48}, "tp divides q_heads", {"tp": [16], "world_size": [32]}),
        ({"world_size": 24, "tp": 12}, "tp divides q_heads", {"tp": [8]}),
        ({"kvp": 3}, "the KV-sharing group, kvp or kvdp*cp ranks, divides tp", {"kvp": [2, 4]}),
        ({"cp": 3}, "the KV-sharing group, kvp or kvdp*cp ranks, divides tp", {"cp": [2, 4]}),
        (
            {"kvdp": 8, "cp": 4},
            "the KV-sharing group, kvp or kvdp*cp ranks, divides tp",
            {"kvdp": [4], "cp": [2], "world_size": [32]},
        ),
        ({"block_size": 100, "seg_size": 512}, "block_size divides seg_size", {"block_size": [64, 128]}),
        ({"kvp": 2, "kv_layout": Interleaved(8)}, "kvp takes kv_layout Contiguous or RoundRobin", {"kvp": [1]}),
        (
            {"cp": 2, "kv_layout": Interleaved(3)},
            "kv_layout's interleave divides block_size",
            {"kv_layout": ["Interleaved(interleave=4)", "Interleaved(interleave=2)"], "block_size": [126, 129]},
        ),
    ],
)
def test_each_rule_and_its_nearest_values(changes, rule, nearest):
    with pytest.raises(PlanError) as error:
        ShardingPlan(SHAPE, **{"world_size": 16, **changes})
    assert error.value.rule == rule
    for name, values in nearest.items():
        assert error.value.nearest[name] == values
        assert f"nearest feasible {name}: {', '.join(map(str, values))}" in str(error.value)


def test_prefill_and_decoding_do_not_mix():
    with pytest.raises(PlanError, match=r"kvp == 1 or kvdp\*cp == 1.*got kvp=2, cp=2") as error:
        ShardingPlan(SHAPE, world_size=16, kvp=2, cp=2)
    assert error.value.nearest == {"kvp": [1], "cp": [1]}


def test_kv_heads_that_do_not_fit_their_groups():
    shape = AttentionShape(q_heads=48, kv_heads=6, head_dim=64)
    with pytest.raises(PlanError, match=r"divides kv_heads or is a multiple of it.*kv_heads=6") as error:
        ShardingPlan(shape, world_size=16, kvp=4)
    assert error.value.nearest["kvp"] == [8]
    # A world of 48 would be feasible, with 12 groups for 6 heads, but 12 ranks, 3 groups, are nearer.
    assert error.value.nearest["world_size"] == [12, 24]
    assert error.value.nearest["kv_heads"] == [4, 8]


def test_head_dim():
    with pytest.raises(PlanError, match="head_dim <= 128") as error:
        ShardingPlan(AttentionShape(8, 8, 192), world_size=4)
    assert error.value.nearest == {"head_dim": [128]}
    with pytest.raises(PlanError, match="head_dim is even for decoding") as error:
        ShardingPlan(AttentionShape(8, 8, 63), world_size=4, cp=4)
    assert error.value.nearest == {"head_dim": [62, 64], "cp": [1]}
    ShardingPlan(AttentionShape(8, 8, 63), world_size=4, kvp=4)


def test_lnc_divides_hidden():
    with pytest.raises(PlanError, match="lnc divides hidden; got lnc=2, hidden=2881; nearest feasible lnc: 1"):
        ShardingPlan(AttentionShape(8, 8, 64, hidden=2881), world_size=4)


def test_where_two_parameters_must_change_they_are_offered_together():
    with pytest.raises(PlanError) as error:
        ShardingPlan(AttentionShape(4, 2, 32), world_size=3, kvp=3)
    assert error.value.nearest == {"kvp, world_size": ["(4, 4)", "(2, 4)"]}


def test_many_mistakes_at_once_are_all_mended_in_the_offer():
    with pytest.raises(PlanError, match="world_size >= 1") as error:
        ShardingPlan(SHAPE, world_size=0, kvp=-1, lnc=7, target="x", block_size=0)
    assert error.value.nearest == {"block_size, kvp, lnc, target, world_size": ["(1, 1, 2, trn2, 1)"]}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"shape": (32, 8, 128)}, "shape"),
        ({"world_size": 4.0}, "world_size"),
        ({"tp": "4"}, "tp"),
        ({"kvp": True}, "kvp"),
        ({"kvdp": None}, "kvdp"),
        ({"lnc": "2"}, "lnc"),
        ({"kv_layout": "round_robin"}, "kv_layout"),
        ({"kv_layout": RoundRobin}, "kv_layout"),
        ({"kv_layout": Interleaved(2.0)}, "kv_layout"),
        ({"kv_layout": Interleaved(True)}, "kv_layout"),
        ({"target": 2}, "target"),
        ({"rank_order": None}, "rank_order"),
    ],
)
def test_wrong_types(changes, argument):
    with pytest.raises(ArgumentTypeError) as error:
        ShardingPlan(**{"shape": SHAPE, "world_size": 4, **changes})
    assert error.value.argument == argument


def test_errors_are_value_errors_and_a_rank_outside_is_refused():
    with pytest.raises(ValueError, match="rule:"):
        ShardingPlan(SHAPE, world_size=5)
    plan = ShardingPlan(SHAPE, world_size=4)
    for rank in (-1, 4, True, 1.0):
        with pytest.raises(ArgumentError):
            plan.rank(rank)
