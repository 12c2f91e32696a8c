"""Caches moved between random plans, on real ranks, and the bytes against a count token by token."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from typing import Any

import pytest
import torch

from nki_parallel_attn import AttentionShape, Contiguous, Interleaved, RoundRobin, ShardingPlan
from nki_parallel_attn.errors import ArgumentError, PeerError, PlanError, RankFailedError
from nki_parallel_attn.testing import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def random_plan(draw: random.Random, shape: AttentionShape, world: int, tp: int, length: int) -> ShardingPlan:
    """Any plan of the model copy: drawn until one is feasible."""
    sizes = [n for n in range(1, tp + 1) if tp % n == 0]
    while True:
        kvp, kvdp, cp = (draw.choice(sizes) for _ in range(3))
        if draw.random() < 0.3:
            kvdp = cp = 1
        else:
            kvp = 1
        block_size = draw.choice([1, 2, 4, 6])
        try:
            plan = ShardingPlan(
                shape,
                world_size=world,
                tp=tp,
                kvp=kvp,
                kvdp=kvdp,
                cp=cp,
                kv_layout=draw.choice([RoundRobin(), Contiguous(), Interleaved(draw.choice([1, 2]))]),
                block_size=block_size,
                rank_order=draw.choice(["consecutive", "strided"]),
                max_seq_len=length + draw.choice([0, 0, 7]),
            )
        except PlanError:
            continue
        return plan


def random_pair(seed: int, tp: int, replicas: int) -> tuple[ShardingPlan, ShardingPlan, list[int]]:
    """Source, target, and lengths of a batch that both kvdp divide."""
    draw = random.Random(seed)
    heads = [n for n in (1, 2, 3, 4, 8) if tp % n == 0 or n % tp == 0]
    kv_heads = draw.choice(heads)
    q_heads = next(n for n in range(tp, 8 * tp * kv_heads, tp) if n % kv_heads == 0)
    shape, length = AttentionShape(q_heads, kv_heads, draw.choice([2, 8]), layers=2), draw.randint(1, 40)
    source, target = (random_plan(draw, shape, tp * replicas, tp, length) for _ in range(2))
    batch = next(n for n in range(1, 65) if n % source.kvdp == 0 and n % target.kvdp == 0)
    batch *= 1 if batch > 2 else draw.choice([1, 2])
    return source, target, [draw.randint(0, length) for _ in range(batch - 1)] + [length]


def holds(plan: ShardingPlan, rank: int, lengths: list[int]) -> set[tuple[int, int, int]]:
    """(sequence, KV head, position) of everything that a rank holds."""
    view, batch = plan.rank(rank), len(lengths)
    rows = range(batch)[view.batch_slice(batch)]
    return {
        (row, head, position)
        for row in rows
        for head in view.kv_heads
        for position in range(lengths[row])
        if int(plan.layout.owner(position)) == view.sequence_index
    }


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8])
def test_bytes_against_a_count(tp: int) -> None:
    for seed in range(15):
        source, target, lengths = random_pair(seed, tp, 2)
        moved = target.redistribution(source, lengths, torch.bfloat16)
        token = 2 * 2 * target.shape.head_dim * 2
        before = [holds(source, rank, lengths) for rank in range(tp)]
        after = [holds(target, rank, lengths) for rank in range(tp)]
        assert moved.received == tuple(token * len(new - old) for old, new in zip(before, after, strict=True))
        assert moved.held == tuple(token * len(new) for new in after)
        assert sum(moved.sent) == sum(moved.received)
        assert all(sent == 0 for sent, old in zip(moved.sent, before, strict=True) if not old)


def global_kv(shape: AttentionShape, lengths: list[int], slots: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, kv_heads, slots, d]; beyond a sequence's length, zeros."""
    generator = torch.Generator().manual_seed(seed)
    # The same numbers for any number of slots.
    kv = torch.randn(len(lengths), shape.kv_heads, 64, shape.head_dim, generator=generator)[:, :, :slots].clone()
    for row, length in enumerate(lengths):
        kv[row, :, length:] = 0
    return kv.to(dtype)


def redistribute_here(seed: int, tp: int, replicas: int) -> None:
    """One random pair on this rank; what comes out is what the plan cuts from the whole tensors."""
    rank = torch.distributed.get_rank()
    source, target, lengths = random_pair(seed, tp, replicas)
    dtype, copy = DTYPES[seed % 3], rank // tp
    old, new = source.rank(rank), target.rank(rank)
    # Both model copies have their own KV.
    tensors = [(10 * copy + n, dtype) for n in range(2 * target.shape.layers)]
    caches = [old.shard_kv(global_kv(target.shape, lengths, source.max_seq_len, *how)) for how in tensors]
    expected = [new.shard_kv(global_kv(target.shape, lengths, target.max_seq_len, *how)) for how in tensors]
    table = None
    if seed % 2:
        # Blocks in any order and others between them.
        blocks = len(caches[0])
        order = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(rank))
        table = order[:blocks].view(-1, source.blocks_per_sequence()).to(torch.int32)
        caches = [scattered(cache, order) for cache in caches]
    kept = [cache.clone() for cache in caches]
    result = target.redistribute(source, caches, lengths, table)
    assert len(result.caches) == len(expected)
    for got, want in zip(result.caches, expected, strict=True):
        assert got.dtype == want.dtype and torch.equal(got.float(), want.float())
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(caches, kept, strict=True))
    assert result.bytes_sent == target.redistribution(source, lengths, dtype).sent[rank % tp]


def scattered(cache: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    wide = torch.full((len(order), *cache.shape[1:]), 7.0)
    wide[order[: len(cache)]] = cache.float()
    return wide.to(cache.dtype)


def redistribute_many(seeds: list[int], tp: int, replicas: int) -> None:
    for seed in seeds:
        redistribute_here(seed, tp, replicas)


@pytest.mark.parametrize(("tp", "replicas"), [(2, 1), (3, 1), (4, 1), (2, 2), (8, 1)])
def test_caches_on_ranks(tp: int, replicas: int) -> None:
    run_ranks(redistribute_many, tp * replicas, args=(list(range(8)), tp, replicas))


def test_one_rank_without_torch_distributed() -> None:
    shape = AttentionShape(4, 2, 8)
    source, target = (ShardingPlan(shape, world_size=1, block_size=b, max_seq_len=20) for b in (4, 16))
    kv = global_kv(shape, [20, 3], 20, 0, torch.float32)
    result = target.redistribute(source, [source.rank(0).shard_kv(kv)], [20, 3])
    assert torch.equal(result.caches[0], target.rank(0).shard_kv(kv)) and result.bytes_sent == 0


@pytest.mark.parametrize("world", [2, 4])
def test_prefill_to_kvdp_by_hand(world: int) -> None:
    """Every rank sends its blocks of all sequences but its own, and nothing to itself."""
    shape = AttentionShape(world, 2, 16, layers=3)
    prefill = ShardingPlan(shape, world_size=world, kvp=world, block_size=4)
    decode = ShardingPlan(shape, world_size=world, kvdp=world, block_size=4)
    lengths, token = [29] * world, 2 * 3 * 2 * 16 * 4
    moved = decode.redistribution(prefill, lengths, torch.float32)
    held = [prefill.rank(rank).tokens_held(29) for rank in range(world)]
    assert moved.sent == tuple(token * (world - 1) * tokens for tokens in held)
    assert moved.received == tuple(token * (29 - tokens) for tokens in held)
    assert moved.held == (token * 29,) * world
    same = ShardingPlan(shape, world_size=world, cp=world, block_size=4)
    assert set(same.redistribution(prefill, lengths, torch.float32).sent) == {0}


def test_copies_of_a_head_share_the_sending() -> None:
    """Four groups of two ranks hold the one KV head; then every rank holds all of it."""
    shape = AttentionShape(8, 1, 16)
    halves, whole = (ShardingPlan(shape, world_size=8, kvp=kvp, block_size=4) for kvp in (2, 1))
    moved = whole.redistribution(halves, [32], torch.float32)
    assert moved.sent == moved.received == (2 * 16 * 16 * 4,) * 8


def wrong_on_one_rank(fault: str) -> None:
    rank = torch.distributed.get_rank()
    shape = AttentionShape(4, 2, 8)
    source = ShardingPlan(shape, world_size=4, kvp=4, block_size=4, max_seq_len=40)
    target = ShardingPlan(shape, world_size=4, kvdp=4, block_size=4, max_seq_len=40)
    caches = [torch.zeros(source.rank(rank).cache_shape(4 * source.blocks_per_sequence())) for _ in range(2)]
    lengths: list[int] = [40, 1, 2, 3]
    arguments: dict[str, Any] = {"caches": caches, "lengths": lengths}
    everywhere = fault in ("batch", "too long", "another model")
    if fault == "batch":
        arguments["lengths"] = [40, 1, 2]
    elif fault == "too long":
        arguments["lengths"] = [41, 1, 2, 3]
    elif fault == "another model":
        target = dataclasses.replace(target, shape=AttentionShape(8, 2, 8))
    elif rank == 1 and fault == "shape":
        arguments["caches"] = [caches[0], caches[1][:, :1]]
    elif rank == 1 and fault == "blocks":
        arguments["caches"] = [cache[:5].clone() for cache in caches]
    elif rank == 1 and fault == "lengths":
        arguments["lengths"] = [40, 1, 2, 4]
    elif rank == 1 and fault == "absent":
        arguments["block_table"] = torch.full((4, 3), -1, dtype=torch.int32)
    elif rank == 1 and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "killed":
        with pytest.raises(PeerError):
            target.redistribute(source, **arguments)
        return
    expected = (ArgumentError, PlanError) if everywhere or (rank == 1 and fault != "lengths") else PeerError
    if fault == "lengths":
        with pytest.raises(RuntimeError, match=r"lengths: .*\[40, 1, 2, 4\]"):
            target.redistribute(source, **arguments)
        return
    with pytest.raises(expected):
        target.redistribute(source, **arguments)


@pytest.mark.parametrize("fault", ["batch", "too long", "another model", "shape", "blocks", "lengths", "absent"])
def test_refused_on_every_rank(fault: str) -> None:
    run_ranks(wrong_on_one_rank, 4, args=(fault,))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("caches", torch.zeros(2, 4, 2, 4, 8)),
        ("caches", [None, None]),
        ("caches", [torch.zeros(4, 2, 4, 8).to_sparse()] * 2),
        ("lengths", None),
        ("lengths", 3),
        ("lengths", ["3"]),
        ("block_table", [[0, 1]]),
        ("block_table", torch.zeros(1, 4, dtype=torch.int32, device="meta")),
        ("source", None),
    ],
)
def test_what_is_of_another_kind(argument: str, value: object) -> None:
    plan = ShardingPlan(AttentionShape(4, 2, 8), world_size=1, block_size=4, max_seq_len=16)
    given: dict[str, Any] = {"source": plan, "caches": [torch.zeros(4, 2, 4, 8)] * 2, "lengths": [3]}
    plan.redistribute(**given)
    with pytest.raises(ArgumentError, match={"source": "the other plan", "lengths": "length"}.get(argument, argument)):
        plan.redistribute(**(given | {argument: value}))


def test_a_dead_rank_stops_the_others() -> None:
    with pytest.raises(RankFailedError, match="rank 1"):
        run_ranks(wrong_on_one_rank, 4, args=("killed",), timeout=60)
