"""KV layouts against their definitions, counted token by token."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from layout_worlds import World, worlds

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.topology.kv_layout import Contiguous, Interleaved, RoundRobin

MANY = settings(max_examples=150, deadline=None)


@MANY
@given(st.data())
def test_owner_and_slot_match_the_definition_and_invert_up_to_2_31(data: st.DataObject) -> None:
    world = data.draw(worlds(max_local=2**31))
    capacity = 2**31 if world.interleave is not None else min(2**31, world.ranks * world.local_length)
    picked = data.draw(st.lists(st.integers(0, capacity - 1), min_size=1, max_size=40))
    picked += [0, capacity - 1]
    for dtype in (torch.int32, torch.int64):
        positions = torch.tensor(picked, dtype=dtype)
        owners, slots = world.layout.owner(positions), world.layout.slot(positions)
        assert owners.dtype == slots.dtype == torch.int64
        assert list(zip(owners.tolist(), slots.tolist(), strict=True)) == [world.locate(p) for p in picked]
    for p in picked:
        owner, slot = world.layout.owner(p), world.layout.slot(p)
        assert (owner, slot) == world.locate(p)
        assert world.layout.position(owner, slot) == p
        assert world.layout.position(owner, torch.tensor([slot])).tolist() == [p]


@MANY
@given(worlds(max_ranks=64, max_local=64), st.integers(1, 4000))
def test_ranks_partition_the_positions(world: World, length: int) -> None:
    if world.interleave is None:
        length = min(length, world.ranks * world.local_length)
    held = [
        world.layout.position(rank, torch.arange(world.layout.filled_slots(rank, length)))
        for rank in range(world.ranks)
    ]
    for rank, positions in enumerate(held):
        assert torch.equal(positions, positions.sort().values), "slots fill in order of position"
        assert (world.layout.owner(positions) == rank).all()
        assert torch.equal(world.layout.slot(positions), torch.arange(len(positions)))
    assert torch.equal(torch.cat(held).sort().values, torch.arange(length))
    assert max(len(h) for h in held) == len(held[0]) <= world.layout.local_slots(length)


@MANY
@given(worlds(max_local=64), st.integers(0, 3000), st.randoms(use_true_random=False))
def test_filled_slots_and_visible_blocks_are_counts(world: World, length: int, random) -> None:  # type: ignore[no-untyped-def]
    if world.interleave is None:
        length = min(length, world.ranks * world.local_length)
    filled = Counter(world.locate(p)[0] for p in range(length))
    # A block is wholly visible once as many of its slots are filled as it has.
    per_block = Counter((rank, slot // world.block_size) for rank, slot in map(world.locate, range(length)))
    full = Counter(rank for (rank, _), count in per_block.items() if count == world.block_size)
    for rank in {0, world.ranks - 1, *(random.randrange(world.ranks) for _ in range(6))}:
        assert world.layout.filled_slots(rank, length) == filled[rank]
        assert world.layout.filled_slots(rank, torch.tensor([length], dtype=torch.int32)).tolist() == [filled[rank]]
        if length:
            assert world.layout.visible_blocks(rank, length - 1) == full[rank]
            assert world.layout.visible_blocks(rank, torch.tensor(length - 1)).item() == full[rank]


@MANY
@given(worlds(max_local=2**31), st.integers(0, 2**31))
def test_filled_slots_sum_to_the_length_at_any_size(world: World, length: int) -> None:
    if world.interleave is None:
        length = min(length, world.ranks * world.local_length)
    filled = [world.layout.filled_slots(rank, length) for rank in range(world.ranks)]
    assert sum(filled) == length
    for rank in (0, world.ranks // 2, world.ranks - 1):
        # The last filled slot is the last position below `length` that the rank holds.
        if filled[rank]:
            assert world.layout.position(rank, filled[rank] - 1) < length
        if world.interleave is not None or filled[rank] < world.local_length:
            assert world.layout.position(rank, filled[rank]) >= length


def test_local_slots_are_the_least_whole_blocks() -> None:
    layout = Interleaved(2).bind(ranks=3, block_size=4)
    assert [layout.local_slots(n) for n in (0, 1, 12, 13)] == [0, 4, 4, 8]
    assert Contiguous().bind(ranks=3, block_size=4, local_length=8).local_slots(24) == 8


def test_padded_queries_see_every_block_of_contiguous_shards() -> None:
    layout = Contiguous().bind(ranks=2, block_size=4, local_length=8)
    assert layout.visible_blocks(1, 15) == layout.visible_blocks(1, 400) == 2


CONTIGUOUS = Contiguous().bind(ranks=2, block_size=4, local_length=8)
CYCLIC = RoundRobin().bind(ranks=2, block_size=4)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: CONTIGUOUS.owner(16), "position"),
        (lambda: CONTIGUOUS.slot(torch.tensor([0, 16])), "position"),
        (lambda: CONTIGUOUS.position(0, 8), "slot"),
        (lambda: CONTIGUOUS.position(2, 0), "rank"),
        (lambda: CONTIGUOUS.filled_slots(0, 17), "length"),
        (lambda: CONTIGUOUS.local_slots(17), "length"),
        (lambda: CYCLIC.owner(torch.tensor([3, -1])), "position"),
        (lambda: CYCLIC.filled_slots(1, -1), "length"),
        (lambda: CYCLIC.visible_blocks(1, -1), "query_position"),
        (lambda: CYCLIC.position(-1, 0), "rank"),
        (lambda: CYCLIC.position(0.0, 0), "rank"),
        (lambda: CYCLIC.filled_slots(True, 0), "rank"),
        (lambda: CYCLIC.owner(1.5), "positions"),
        (lambda: CONTIGUOUS.slot(True), "positions"),
        (lambda: Interleaved(3).bind(ranks=2, block_size=4), "interleave"),
        (lambda: Interleaved(0).bind(ranks=2, block_size=4), "interleave"),
        (lambda: RoundRobin().bind(ranks=0, block_size=4), "ranks"),
        (lambda: Contiguous().bind(ranks=2, block_size=4, local_length=6), "local_length"),
    ],
)
def test_bad_arguments_are_named(call, argument: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=rf"^{argument}: got ") as error:
        call()
    assert error.value.argument == argument


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_positions_must_be_integers(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentTypeError, match="integer"):
        CYCLIC.owner(torch.zeros(2, dtype=dtype))
