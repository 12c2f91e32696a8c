"""One rank's view against the layout's definition, spelled out position by position, and against its own shards."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn import AttentionShape, Contiguous, Interleaved, KVDPCollectiveMode, RoundRobin, ShardingPlan
from nki_parallel_attn.errors import ArgumentError, PlanError

from .plans import plans

SHAPE = AttentionShape(q_heads=8, kv_heads=2, head_dim=16)


def owner(plan, position):
    """Which of the ranks that share a sequence holds `position`, from the layouts' definitions."""
    ranks, block = plan.kvp * plan.cp, plan.block_size
    if isinstance(plan.kv_layout, Contiguous):
        return position // (-(-plan.max_seq_len // (ranks * block)) * block)
    run = plan.kv_layout.interleave if isinstance(plan.kv_layout, Interleaved) else block
    return position // run % ranks


@settings(deadline=None, max_examples=80)
@given(plans(most_ranks=64), st.data())
def test_positions_and_slots(plan, data):
    length = data.draw(st.integers(0, min(plan.max_seq_len, 400)))
    view = plan.rank(data.draw(st.integers(0, plan.world_size - 1)))
    mine = [position for position in range(length) if owner(plan, position) == view.sequence_index]
    assert view.owned_positions(0, length).tolist() == mine
    assert view.tokens_held(length) == len(mine)
    assert view.blocks_held(length) == -(-len(mine) // plan.block_size) <= plan.blocks_per_sequence(length)
    table = view.block_table(length)
    assert table.shape == (1, plan.blocks_per_sequence(length)) and table.dtype == torch.int32
    slots = view.slot_mapping(torch.arange(length), table).tolist()
    assert [position for position, slot in enumerate(slots) if slot >= 0] == mine
    assert [slot for slot in slots if slot >= 0] == list(range(len(mine)))


@settings(deadline=None, max_examples=40)
@given(plans(most_ranks=16), st.data())
def test_shards_are_the_ranks_heads_at_their_slots_and_come_together_again(plan, data):
    length, batch = data.draw(st.integers(1, min(plan.max_seq_len, 100))), plan.kvdp * data.draw(st.integers(1, 2))
    kv = torch.arange(batch * plan.shape.kv_heads * length * 2.0).reshape(batch, plan.shape.kv_heads, length, 2)
    paged = data.draw(st.booleans())
    shards = [plan.rank(rank).shard_kv(kv, paged=paged) for rank in range(plan.tp)]
    assert all(shard.is_contiguous() for shard in shards)
    assert torch.equal(plan.unshard_kv(shards, length, batch, paged=paged), kv)
    assert torch.equal(plan.unshard_kv(shards * plan.replicas, length, batch, paged=paged), kv)

    view = plan.rank(data.draw(st.integers(0, plan.tp - 1)))
    shard, rows = shards[view.rank], range(batch)[view.batch_slice(batch)]
    blocks = plan.blocks_per_sequence(length)
    if paged:
        assert shard.shape == (len(rows) * blocks, *view.cache_shape()[1:3], 2)
    filled = 0
    for position in range(length):
        if owner(plan, position) == view.sequence_index:
            for place, row in enumerate(rows):
                expected = kv[row, view.kv_heads.start : view.kv_heads.stop, position]
                block, offset = divmod(filled, plan.block_size)
                got = shard[place * blocks + block, :, offset] if paged else shard[place, :, filled]
                assert torch.equal(got, expected)
            filled += 1
    assert int((shard != 0).sum()) <= len(rows) * filled * plan.kv_heads_per_rank * 2


@pytest.mark.parametrize("order", ["consecutive", "strided"])
def test_q_shards_come_together_in_head_order(order):
    plan = ShardingPlan(SHAPE, world_size=8, tp=4, kvp=2, rank_order=order)
    q = torch.randn(8, 5, 16)
    shards = [plan.rank(rank).shard_q(q) for rank in range(8)]
    assert torch.equal(plan.unshard_q(shards), q)
    assert torch.equal(plan.unshard_q(shards[:4]), q)


@pytest.mark.parametrize("paged", [True, False])
def test_sharding_keeps_gradients_and_float8(paged):
    plan = ShardingPlan(SHAPE, world_size=4, kvp=4, block_size=4)
    kv = torch.randn(2, 30, 16, dtype=torch.float64, requires_grad=True)
    sum(plan.rank(rank).shard_kv(kv, paged=paged).square().sum() for rank in range(4)).backward()
    assert torch.equal(kv.grad, 2 * kv.detach())
    quantised = kv.detach().to(torch.float8_e4m3fn)
    shards = [plan.rank(rank).shard_kv(quantised, paged=paged) for rank in range(4)]
    assert shards[0].dtype == torch.float8_e4m3fn
    assert torch.equal(plan.unshard_kv(shards, 30, paged=paged).view(torch.uint8), quantised.view(torch.uint8))


def test_cache_shapes():
    plan = ShardingPlan(SHAPE, world_size=4, kvp=2, block_size=16, max_seq_len=100)
    view = plan.rank(0)
    assert view.cache_shape() == (4, 1, 16, 16)
    assert view.cache_shape(9) == (9, 1, 16, 16)
    assert view.cache_shape(9, fp8_packed=True) == (9, 1, 8, 16, 2)
    assert view.shard_kv(torch.zeros(2, 100, 16)).shape == view.cache_shape()
    decode = ShardingPlan(SHAPE, world_size=4, kvdp=2, block_size=16, max_seq_len=100).rank(0)
    assert decode.flat_cache_shape(6) == (3, 1, 112, 16)
    assert decode.flat_cache_shape(6, K_cache_transposed=True) == (3, 1, 16, 112)
    with pytest.raises(ArgumentError, match="block_size"):
        ShardingPlan(SHAPE, world_size=4, block_size=3).rank(0).cache_shape(2, fp8_packed=True)
    with pytest.raises(ArgumentError, match="max_seq_len"):
        ShardingPlan(SHAPE, world_size=4).rank(0).cache_shape()


def test_block_table_arguments():
    view = ShardingPlan(SHAPE, world_size=4, kvp=4, block_size=4).rank(1)
    assert view.block_table(40).tolist() == [[0, 1, 2]]
    assert view.block_table(24).tolist() == [[0, 1]]
    assert view.block_table(17).tolist() == [[0, -1]]
    assert view.block_table(24, [7, 7], max_blocks=4, num_blocks=8).tolist() == [[7, 7, -1, -1]]
    with pytest.raises(ArgumentError, match="blocks: got 1 blocks, expected 2 for this rank's share of 24 tokens"):
        view.block_table(24, [3])
    with pytest.raises(ArgumentError, match="num_blocks"):
        view.block_table(24, [3, 8], num_blocks=8)


def test_prefill_arguments_by_hand():
    plan = ShardingPlan(SHAPE, world_size=8, tp=4, kvp=2, block_size=4, seg_size=16)
    arguments = plan.rank(5).kvp_arguments(q_pos=20)
    assert arguments["replica_groups"].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    plain = {name: value.tolist() if torch.is_tensor(value) else value for name, value in arguments.items()}
    del plain["replica_groups"]
    assert plain == {
        "kvp_q_offset": [[20]],
        "group_size": 2,
        "block_size": 4,
        "seg_size": 16,
        "global_q_offset": 20,
        "kvp_rank_id": [[1]],
        "kvp_group_size": 2,
        "apc_mode": False,
        "valid_num_prior_tokens": None,
    }
    cached = plan.rank(4).kvp_arguments(q_pos=20, apc_mode=True)
    # Blocks 0, 2 and 4 lie before position 20; block 4 ends with position 19.
    assert (cached["global_q_offset"], cached["valid_num_prior_tokens"].tolist()) == (0, [[12]])
    contiguous = dataclasses.replace(plan, kv_layout=Contiguous(), max_seq_len=30)
    arguments = contiguous.rank(5).kvp_arguments(q_pos=20)
    assert (arguments["kvp_q_offset"].tolist(), arguments["kvp_group_size"]) == ([[4]], 0)


def test_decoding_arguments_by_hand():
    plan = ShardingPlan(SHAPE, world_size=8, kvdp=2, cp=2, kv_layout=Interleaved(2), block_size=4, max_seq_len=64)
    arguments = plan.rank(6).decode_arguments()
    assert arguments["KVDP_replica_group"].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert arguments["CP_replica_group"].groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert (arguments["KVDP"], arguments["CP"], arguments["KVDP_rank"].tolist()) == (2, 2, [0])
    assert arguments["KVDP_collective_mode"] is KVDPCollectiveMode.ALL_GATHER_SLICE
    alone = ShardingPlan(SHAPE, world_size=8).rank(3).decode_arguments()
    assert [alone[name] for name in ("KVDP_replica_group", "KVDP_rank", "CP_replica_group")] == [None] * 3

    # Rank 6 is CP rank 1, KVDP rank 0: sequences 0 and 1 of four, positions 2, 3, 6, 7, 10, 11 ...
    view, positions = plan.rank(6), torch.tensor([[7], [8], [9], [10]])
    assert view.pos_ids(positions).tolist() == [[3], [4]]
    assert view.kv_cache_update_idx(positions).tolist() == [[3], [2**32 - 1]]
    assert view.swa_start_pos_ids(positions, 4).tolist() == [[2], [2]]
    assert view.max_context_len(positions).tolist() == [4]
    assert view.S_ctx(positions) == 8
    mask = view.attention_mask(positions, S_ctx=8)
    assert mask.shape == (8, 2, view.q_heads_attn, 1) and view.q_heads_attn == 4
    assert mask[:, :, 0, 0].T.tolist() == [[1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert view.attention_mask(positions)[0, :, 0, 0].tolist() == [1, 0]
    whole = torch.ones(11 + 1, 4, view.q_heads_attn, 1)
    assert view.shard_attention_mask(whole, positions, 8)[:, 0, 0, 0].tolist() == [1, 1, 1, 1, 1, 0, 0, 1]
    table = view.active_blocks_table([[5, 2], [0, 3]], 2, 6)
    assert table.tolist() == [[5, 2], [0, 3]]
    assert view.kv_cache_update_idx(positions, table).tolist() == [[23], [2**32 - 1]]
    assert view.sink(torch.arange(8.0)).flatten().tolist() == [4, 5, 6, 7]
    assert view.kvdp_rank().tolist() == [0] and view.kvdp_rank().dtype == torch.uint32


def test_several_kv_heads_use_per_head_tables():
    view = ShardingPlan(AttentionShape(8, 4, 16), world_size=4, kvdp=2, block_size=4).rank(1)
    assert view.kv_heads == range(2)
    assert view.active_blocks_table([[1, 0]], 2, 2).tolist() == [[[2, 0], [3, 1]]]
    slots = view.kv_cache_update_idx(torch.tensor([[0], [5]]), torch.tensor([[1, 0]]))
    assert slots.tolist() == [[[1], [5]]]


@pytest.mark.parametrize("name", ["kvp_q_offset", "valid_num_prior_tokens", "kvp_arguments"])
def test_prefill_methods_refuse_a_decoding_plan(name):
    with pytest.raises(PlanError, match=r"kvdp\*cp == 1; got kvdp=1, cp=2"):
        getattr(ShardingPlan(SHAPE, world_size=4, cp=2).rank(0), name)(0)


def test_decoding_methods_refuse_a_prefill_plan():
    with pytest.raises(PlanError, match="kvp == 1; got kvp=2"):
        ShardingPlan(SHAPE, world_size=4, kvp=2).rank(0).pos_ids(torch.tensor([[3]]))


def test_contiguous_without_a_length_says_so():
    view = ShardingPlan(SHAPE, world_size=4, kvp=4, kv_layout=Contiguous()).rank(0)
    with pytest.raises(PlanError, match="Contiguous needs max_seq_len"):
        view.kvp_q_offset(0)
    assert ShardingPlan(SHAPE, world_size=4, kv_layout=Contiguous()).rank(0).tokens_held(100) == 100


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda plan: plan.rank(0).shard_kv(torch.zeros(3, 8, 16)), "kv"),
        (lambda plan: plan.rank(0).shard_q(torch.zeros(7, 8, 16)), "q"),
        (lambda plan: plan.rank(0).shard_kv(torch.zeros(2, 101, 16)), "length"),
        (lambda plan: plan.unshard_q([torch.zeros(2, 8, 16)] * 3), "shards"),
        (lambda plan: plan.unshard_kv([torch.zeros(9, 1, 4, 16)] * 4, 30), "local"),
        (lambda plan: plan.rank(0).tokens_held(-1), "length"),
        (lambda plan: plan.replica_group("dp"), "group"),
        (lambda plan: plan.rank(0).slot_mapping(torch.tensor([0.0]), torch.tensor([[0]])), "positions"),
    ],
)
def test_bad_arguments(call, argument):
    plan = ShardingPlan(SHAPE, world_size=4, kvp=2, block_size=4, max_seq_len=100)
    with pytest.raises(ArgumentError) as error:
        call(plan)
    assert error.value.argument == argument


def test_kvdp_needs_a_batch_it_divides():
    plan = ShardingPlan(SHAPE, world_size=4, kvdp=2, kv_layout=RoundRobin())
    with pytest.raises(PlanError, match="kvdp divides batch; got batch=5, kvdp=2; nearest feasible batch: 4, 6"):
        plan.rank(0).shard_kv(torch.zeros(5, 2, 8, 16))
    with pytest.raises(ArgumentError, match="kvdp=2 divides B"):
        plan.rank(0).shard_kv(torch.zeros(2, 8, 16))
