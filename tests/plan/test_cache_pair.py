"""check_same_cache against a comparison of every rank's heads, sequences and slots."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn import AttentionShape, Contiguous, Interleaved, RoundRobin, ShardingPlan
from nki_parallel_attn.errors import PlanError

from .plans import plans

SHAPE = AttentionShape(q_heads=8, kv_heads=2, head_dim=16)
MODES = [{"kvp": 1}, *({name: n} for name in ("kvp", "cp", "kvdp") for n in (2, 4)), {"kvdp": 2, "cp": 2}]


def where(plan, length):
    """By rank: KV heads, share of the batch, and (position, block, offset) of what it holds below `length`."""
    places = []
    for rank in range(plan.world_size):
        view = plan.rank(rank)
        held = view.owned_positions(0, length)
        slots = plan.layout.slot(held)
        spots = zip(held.tolist(), (slots // plan.block_size).tolist(), (slots % plan.block_size).tolist(), strict=True)
        places.append((view.kv_heads, view.coordinates["kvdp"], plan.kvdp, list(spots)))
    return places


def agrees(one, other):
    try:
        one.check_same_cache(other)
    except PlanError:
        return False
    return True


@st.composite
def pairs(draw):
    common = {"world_size": draw(st.sampled_from([4, 8])), "max_seq_len": draw(st.integers(1, 80))}
    layouts = st.sampled_from([RoundRobin(), Contiguous(), Interleaved(1), Interleaved(2), Interleaved(4)])
    both = []
    for _ in range(2):
        mode = draw(st.sampled_from(MODES))
        layout = RoundRobin() if "kvp" in mode and draw(st.booleans()) else draw(layouts)
        if "kvp" in mode and isinstance(layout, Interleaved):
            layout = Contiguous()
        order = draw(st.sampled_from(["consecutive", "strided"]))
        block_size = draw(st.sampled_from([4, 4, 8]))
        both.append(ShardingPlan(SHAPE, **common, **mode, kv_layout=layout, block_size=block_size, rank_order=order))
    return both


@settings(deadline=None, max_examples=200)
@given(pairs())
def test_against_every_slot(pair):
    one, other = pair
    same = where(one, one.max_seq_len) == where(other, other.max_seq_len) and one.block_size == other.block_size
    assert agrees(one, other) == agrees(other, one) == same


@settings(deadline=None, max_examples=60)
@given(plans(most_ranks=64, modes=("kvp",)))
def test_prefill_by_kvp_and_decoding_by_cp(prefill):
    prefill = dataclasses.replace(prefill, kv_layout=RoundRobin(), max_seq_len=None)
    decode = dataclasses.replace(prefill, kvp=1, cp=prefill.kvp, kv_layout=Interleaved(prefill.block_size))
    if prefill.shape.head_dim % 2 == 0:
        decode.check_same_cache(prefill)
        assert where(prefill, 200) == where(decode, 200)


CHANGES = {
    "shape": {"shape": AttentionShape(q_heads=8, kv_heads=4, head_dim=16)},
    "world_size": {"world_size": 16, "tp": 8},
    "tp": {"tp": 4},
    "kvdp": {"kvp": 1, "kvdp": 4},
    "as many ranks": {"kvp": 1, "cp": 2},
    "rank_order": {"rank_order": "strided"},
    "block_size": {"block_size": 16},
    "kv_layout": {"kv_layout": Contiguous()},
}


@pytest.mark.parametrize("rule", CHANGES)
def test_the_rule_is_named(rule):
    plan = ShardingPlan(SHAPE, world_size=8, kvp=4, block_size=8, max_seq_len=100)
    with pytest.raises(PlanError) as error:
        dataclasses.replace(plan, **CHANGES[rule]).check_same_cache(plan)
    assert rule in error.value.rule


def test_the_first_position_that_differs_is_named():
    plan = ShardingPlan(SHAPE, world_size=8, cp=4, block_size=8)
    with pytest.raises(PlanError, match=r"position 2 in slot 2 of rank 0 and .* position 2 in slot 0 of rank 1"):
        plan.check_same_cache(dataclasses.replace(plan, kv_layout=Interleaved(2)))
