"""Memory against tensors that are really made, traffic against a count of what each rank must send to each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn import (
    AttentionShape,
    Contiguous,
    CPCollectiveMode,
    KVDPCollectiveMode,
    ShardingPlan,
)
from nki_parallel_attn.errors import ArgumentError

from .plans import plans

SHAPE = AttentionShape(q_heads=8, kv_heads=2, head_dim=16, layers=3)


@settings(deadline=None, max_examples=60)
@given(plans(most_ranks=32), st.data())
def test_memory_is_what_the_shards_take(plan, data):
    length, batch = data.draw(st.integers(1, min(plan.max_seq_len, 200))), plan.kvdp * data.draw(st.integers(1, 2))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]))
    kv = torch.zeros(batch, plan.shape.kv_heads, length, plan.shape.head_dim, dtype=dtype)
    memory = plan.memory(length, batch, dtype)
    for rank in (0, plan.world_size - 1):
        assert memory.per_rank == 2 * plan.shape.layers * plan.rank(rank).shard_kv(kv).nbytes
    whole_blocks = -(-length // plan.block_size) * plan.block_size
    assert memory.unsharded == 2 * plan.shape.layers * kv.nbytes // length * whole_blocks
    assert memory.tensor_parallel >= memory.unsharded // plan.tp


def test_memory_by_hand():
    shape = AttentionShape(q_heads=64, kv_heads=8, head_dim=128, layers=80)
    memory = ShardingPlan(shape, world_size=32, kvp=4, max_seq_len=2**17).memory()
    assert memory.unsharded == 2 * 80 * 8 * 2**17 * 128 * 2
    assert memory.tensor_parallel == memory.unsharded // 8
    assert memory.per_rank == memory.unsharded // 32
    assert memory.hbm_per_rank == 24 * 2**30 and memory.fits
    assert not ShardingPlan(shape, world_size=1, max_seq_len=2**17).memory().fits


def pairs(plan, tokens, q_pos, window):
    """visible[rank][t]: whether Q token t sees a key of each rank that shares the sequence, one pair at a time."""
    sees = [[False] * tokens for _ in range(plan.kvp)]
    for t in range(tokens):
        for key in range(max(0, q_pos + t + 1 - window) if window else 0, q_pos + t + 1):
            sees[int(plan.layout.owner(key))][t] = True
    return sees


@settings(deadline=None, max_examples=40)
@given(plans(most_ranks=32, modes=("kvp",)), st.data())
def test_prefill_traffic_against_a_count(plan, data):
    capacity = min(plan.max_seq_len, 60)
    tokens = data.draw(st.integers(1, capacity))
    q_pos, window = data.draw(st.integers(0, capacity - tokens)), data.draw(st.sampled_from([0, 1, 5, 17]))
    traffic = plan.traffic(tokens, 2, torch.bfloat16, partial_dtype=torch.float32, q_pos=q_pos, sliding_window=window)
    sees = pairs(plan, tokens, q_pos, window)
    rows, head_dim, ranks = 2 * plan.q_heads_per_rank, plan.shape.head_dim, range(plan.kvp)
    sent = {"Q": [], "partial": [], "statistics": []}
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        sent["Q"].append(sum(rows * sum(sees[other]) * head_dim * 2 for other in others))
        sent["partial"].append(sum(rows * sum(sees[rank]) * head_dim * 4 for _ in others))
        sent["statistics"].append(sum(rows * sum(sees[rank]) * 4 for _ in others))
    assert [collective.least for collective in traffic.collectives] == [max(counts) for counts in sent.values()]
    everything = rows * tokens * (plan.kvp - 1)
    assert [collective.bytes_sent for collective in traffic.collectives] == [
        everything * head_dim * 2,
        everything * head_dim * 4,
        everything * 4,
    ]
    assert traffic.least <= traffic.bytes_sent
    held = max(plan.rank(rank).tokens_held(q_pos + tokens) for rank in range(plan.tp))
    assert traffic.gather_kv == (plan.kvp - 1) * 2 * held * plan.kv_heads_per_rank * head_dim * 2 * 2


def test_prefill_traffic_of_a_contiguous_layout_needs_less_than_it_sends():
    shape = AttentionShape(q_heads=8, kv_heads=1, head_dim=128)
    plan = ShardingPlan(shape, world_size=4, kvp=4, kv_layout=Contiguous(), max_seq_len=8192)
    q, partials, _ = plan.traffic(8192).collectives
    # Rank 0 sees all 8192 rows, rank 3 the last 2048: Q goes to ranks 0, 1 and 2 for 8192 + 6144 + 4096 rows.
    assert (q.least, q.bytes_sent) == (2 * (8192 + 6144 + 4096) * 256, 3 * 2 * 8192 * 256)
    assert partials.least == partials.bytes_sent == 3 * 2 * 8192 * 256


def test_decoding_traffic_by_hand():
    plan = ShardingPlan(SHAPE, world_size=8, kvdp=2, cp=4)
    rows = 6 * 1 * 3  # batch 6, one Q head per rank, 3 new tokens; under KVDP half the batch and twice the heads
    q = rows * 16 * 2
    traffic = plan.traffic(3, 6, kvdp_mode=KVDPCollectiveMode.ALL_TO_ALL)
    assert [(c.name, c.group, c.bytes_sent, c.least) for c in traffic.collectives] == [
        ("all-to-all of Q", "kvdp", q // 2, q // 2),
        ("all-gather of Q", "cp", 3 * q, 3 * q),
        ("all-gather of maxima and sums", "cp", 3 * rows * 4 * 2 * 4, 3 * rows * 4 * 2 * 4),
        ("all-to-all of partial outputs", "cp", 3 * q, 3 * q),
        ("all-to-all of output", "kvdp", q // 2, q // 2),
    ]
    assert traffic.gather_kv == 0
    sliced = plan.traffic(3, 6, partial_dtype=torch.float32, cp_mode=CPCollectiveMode.REDUCE_SCATTER)
    assert [(c.name, c.bytes_sent, c.least) for c in sliced.collectives] == [
        ("all-gather and slice of Q", q, q // 2),
        ("all-gather of Q", 3 * q, 3 * q),
        ("all-gather of maxima and sums", 3 * rows * 32, 3 * rows * 32),
        ("reduce-scatter of partial outputs", 6 * q, 6 * q),
        ("all-gather and slice of output", q, q // 2),
    ]


def test_one_statistic_for_each_row():
    plan = ShardingPlan(SHAPE, world_size=4, cp=4)
    named = {c.name: c.bytes_sent for c in plan.traffic(3, 6, statistics=1).collectives}
    assert named["all-gather of log-sum-exps"] == 3 * (6 * 2 * 3) * 4 * 4
    two = plan.traffic(3, 6)
    assert two.bytes_sent == sum(named.values()) + named["all-gather of log-sum-exps"]
    for wrong in (0, 3):
        with pytest.raises(ArgumentError, match="statistics"):
            plan.traffic(3, 6, statistics=wrong)


def test_a_plan_that_shares_no_kv_sends_nothing():
    traffic = ShardingPlan(SHAPE, world_size=8).traffic(1, 4)
    assert (traffic.collectives, traffic.bytes_sent) == ((), 0)


def test_kvdp_mode_follows_the_platform():
    shape = AttentionShape(q_heads=64, kv_heads=8, head_dim=64)
    modes = {
        (kvdp, lnc): ShardingPlan(shape, world_size=64, kvdp=kvdp, lnc=lnc).kvdp_collective_mode.name
        for kvdp in (2, 4, 8)
        for lnc in (1, 2)
    }
    gather, exchange = "ALL_GATHER_SLICE", "ALL_TO_ALL"
    assert modes == {
        (2, 1): gather,
        (2, 2): gather,
        (4, 1): gather,
        (4, 2): exchange,
        (8, 1): exchange,
        (8, 2): exchange,
    }


@pytest.mark.parametrize(("tokens", "batch", "argument"), [(0, 1, "tokens"), (1, 0, "batch"), (1.5, 1, "tokens")])
def test_bad_counts(tokens, batch, argument):
    with pytest.raises(ArgumentError) as error:
        ShardingPlan(SHAPE, world_size=4, kvp=2).traffic(tokens, batch)
    assert error.value.argument == argument


def test_arguments_of_the_other_kind_of_plan_are_refused():
    prefill, decode = ShardingPlan(SHAPE, world_size=4, kvp=2), ShardingPlan(SHAPE, world_size=4, cp=2)
    for call in (
        lambda: prefill.traffic(1, cp_mode=CPCollectiveMode.ALL_TO_ALL),
        lambda: prefill.traffic(1, kvdp_mode=KVDPCollectiveMode.ALL_TO_ALL),
        lambda: prefill.traffic(1, statistics=1),
        lambda: decode.traffic(1, q_pos=3),
        lambda: decode.traffic(1, sliding_window=3),
    ):
        with pytest.raises(ArgumentError, match="for a plan that"):
            call()
