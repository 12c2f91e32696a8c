"""Block pool, block tables, slot mappings and the paged cache, against a dictionary that stands for the cache."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from layout_worlds import worlds

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.topology.block_tables import (
    BlockPool,
    active_blocks_table,
    block_table,
    blocks_needed,
    check_block_table,
    per_head_block_table,
)
from nki_parallel_attn.topology.kv_layout import Contiguous, RoundRobin
from nki_parallel_attn.topology.paged_cache import pack_fp8_k, read_kv_cache, unpack_fp8_k, write_kv_cache
from nki_parallel_attn.topology.slot_mapping import check_slots, owned_positions, per_head_slots, slot_mapping

ROUND_ROBIN = RoundRobin().bind(ranks=2, block_size=4)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, fork, grow and go; the pool must agree with a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.sequences: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(ArgumentError, match=r"^count: got "):
                self.pool.allocate(count)
            assert self.pool.num_free == free
        else:
            held = {block for sequence in self.sequences for block in sequence}
            blocks = self.pool.allocate(count)
            assert blocks == sorted(set(range(12)) - held)[:count]
            self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def share_prefix(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        prefix = sequence[: data.draw(st.integers(0, len(sequence)))]
        self.sequences.append(self.pool.share(prefix))
        assert self.sequences[-1] == prefix

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1))))

    @invariant()
    def holders_are_counts(self) -> None:
        counts = Counter(block for sequence in self.sequences for block in sequence)
        assert [self.pool.holders(block) for block in range(12)] == [counts[block] for block in range(12)]
        assert self.pool.num_free == 12 - len(counts)
        for sequence in self.sequences:
            if any(counts[block] > 1 for block in sequence):
                with pytest.raises(ArgumentError, match="holders"):
                    self.pool.check_writable(sequence)
            else:
                self.pool.check_writable(sequence)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPool = PoolMachine.TestCase


def test_pool_refuses_what_is_not_held_and_changes_nothing() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    for call in (
        lambda: pool.free([0, 0]),
        lambda: pool.share([0, 3]),
        lambda: pool.free([0, 4]),
        lambda: BlockPool(0),
    ):
        with pytest.raises(ArgumentError):
            call()
    assert [pool.holders(b) for b in range(4)] == [1, 1, 0, 0]
    pool.free(blocks)
    assert pool.num_free == 4


def test_block_table_shapes_and_values() -> None:
    table = block_table([5, 2, 5], 5, 8)
    assert table.dtype == torch.int32
    assert table.tolist() == [[5, 2, 5, -1, -1]]
    assert block_table([], 2, 8).tolist() == [[-1, -1]]
    batch = active_blocks_table([[1], [0, 3]], 3, 4)
    assert batch.dtype == torch.int32
    assert batch.tolist() == [[1, -1, -1], [0, 3, -1]]
    heads = active_blocks_table([[1], [0, 3]], 3, 4, kv_heads=2)
    assert heads.dtype == torch.int32
    assert heads.tolist() == [[[2, -1, -1], [3, -1, -1]], [[0, 6, -1], [1, 7, -1]]]
    assert torch.equal(per_head_block_table(batch, 4, 2), heads)
    check_block_table(heads, 4, kv_heads=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_table([0, 8], 4, 8), r"^blocks\[0, 1\]: got 8, expected -1 or a block in \[0, 8\)"),
        (lambda: block_table([-2], 4, 8), r"^blocks\[0, 0\]: got -2"),
        (lambda: block_table([0, 1, 2], 2, 8), r"^blocks: got 3 blocks, expected at most max_blocks=2"),
        (lambda: block_table([0.7], 2, 8), r"^blocks: got torch.float32"),
        (lambda: block_table([2**31], 2, 2**32), r"^num_blocks: got 4294967296"),
        (lambda: block_table([0], -1, 8), r"^max_blocks: got -1"),
        (lambda: active_blocks_table([], 2, 8), r"^sequences: got no sequence"),
        (lambda: check_block_table(torch.tensor([[[0, 1], [2, 16]]]), 8, 2), r"^block_tables\[0, 1, 1\]: got 16"),
        (lambda: check_block_table(torch.tensor([[0.0]]), 8), r"^block_tables: got torch.float32"),
        (lambda: per_head_block_table(torch.tensor([[0]]), 2**30, 2), r"^num_blocks\*kv_heads: got 2147483648"),
    ],
)
def test_bad_tables_name_index_and_value(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32])
def test_block_numbers_of_any_width(dtype: torch.dtype) -> None:
    """-1 or the limit may be no number of the table's dtype."""
    check_block_table(torch.tensor([[100]]).to(dtype), 2**20)
    with pytest.raises(ArgumentError, match=r"^block_tables\[0, 0\]: got 100"):
        check_block_table(torch.tensor([[100]]).to(dtype), 100)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_prefill_in_chunks_lands_where_the_layout_says(data: st.DataObject) -> None:
    """Every rank writes each chunk into its own shuffled pool; read back by table, the cache is the owned tokens."""
    world = data.draw(worlds(max_ranks=6, max_block=6, max_local=30))
    layout, block_size = world.layout, world.block_size
    length = data.draw(st.integers(1, world.ranks * world.local_length))
    kv_heads, dim = data.draw(st.integers(1, 3)), 2
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    k = torch.randn(kv_heads, length, dim, generator=seed)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    for rank in range(world.ranks):
        needed = blocks_needed(layout, rank, length)
        num_blocks = needed + 2
        blocks = torch.randperm(num_blocks, generator=seed)[:needed].tolist()
        table = block_table(blocks, needed + 1, num_blocks)
        cache = torch.full((num_blocks, kv_heads, block_size, dim), float("nan"))
        for start, stop in pairwise(cuts):
            own = owned_positions(layout, rank, start, stop)
            assert own.tolist() == [p for p in range(start, stop) if world.locate(p)[0] == rank]
            padded = torch.cat([torch.arange(start, stop), torch.tensor([-1, -1])])
            chunk = torch.cat([k[:, start:stop], torch.full((kv_heads, 2, dim), 7.0)], dim=1)
            if data.draw(st.booleans()):  # the whole chunk, with others' tokens and padding skipped ...
                write_kv_cache(cache, chunk, slot_mapping(layout, rank, padded, table))
            else:  # ... or just the tokens that the rank projected
                write_kv_cache(cache, k[:, own], slot_mapping(layout, rank, own, table[0]))
        for p in range(length):
            owner, slot = world.locate(p)
            if owner == rank:
                assert torch.equal(cache[blocks[slot // block_size], :, slot % block_size], k[:, p])
        written = (~cache.isnan()).any(1).any(-1).sum()
        assert written == layout.filled_slots(rank, length), "nothing else was written"
        everything = slot_mapping(layout, rank, torch.arange(length), table)
        back = read_kv_cache(cache, everything)
        owned = torch.tensor([world.locate(p)[0] == rank for p in range(length)])
        assert torch.equal(back, torch.where(owned[:, None], k, 0.0))


def test_batched_rows_use_their_own_table() -> None:
    positions = torch.tensor([[4, 5], [12, -1]], dtype=torch.int32)
    tables = torch.tensor([[3, -1], [0, 2]], dtype=torch.int32)
    slots = slot_mapping(ROUND_ROBIN, 1, positions, tables)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [[12, 13], [8, -1]]
    assert slot_mapping(ROUND_ROBIN, 0, positions, tables).tolist() == [[-1, -1], [-1, -1]]


@given(st.lists(st.integers(-1, 63), min_size=1, max_size=8, unique=True), st.integers(1, 4), st.integers(1, 8))
def test_per_head_slots_address_the_flattened_cache(picked: list[int], kv_heads: int, block_size: int) -> None:
    """A per-head slot is an index into the cache seen as [num_blocks*kv_heads*block_size]."""
    slots = torch.tensor([picked])
    spread = per_head_slots(slots, kv_heads, block_size)
    cache = torch.arange(64 * kv_heads * block_size).reshape(64, kv_heads, block_size)
    for column, slot in enumerate(picked):
        for head in range(kv_heads):
            expected = -1 if slot < 0 else int(cache[slot // block_size, head, slot % block_size])
            assert spread[0, head, column] == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: slot_mapping(ROUND_ROBIN, 0, torch.arange(16), torch.tensor([[2, -1]])),
            r"^block_table\[0, 1\]: got absent, expected a block for position 8, which this rank holds",
        ),
        (
            lambda: slot_mapping(ROUND_ROBIN, 1, torch.tensor([20]), torch.tensor([[2, 1]])),
            r"^block_table\[0, 2\]: got a table of 2 blocks, expected a block for position 20",
        ),
        (
            lambda: slot_mapping(ROUND_ROBIN, 0, torch.tensor([0]), torch.empty(1, 0, dtype=torch.int32)),
            r"^block_table\[0, 0\]: got a table of 0 blocks",
        ),
        (
            lambda: slot_mapping(ROUND_ROBIN, 0, torch.arange(16), torch.tensor([[2, 2]])),
            r"^slots\[0, 8\]: got 8, expected another slot than slots\[0, 0\]",
        ),
        (
            lambda: slot_mapping(ROUND_ROBIN, 0, torch.tensor([[1], [1]]), torch.tensor([[2], [2]])),
            r"^slots\[1, 0\]: got 9, expected another slot than slots\[0, 0\]",
        ),
        (lambda: slot_mapping(ROUND_ROBIN, 0, torch.tensor([-2]), torch.tensor([[2]])), r"^positions: got -2"),
        (
            lambda: slot_mapping(ROUND_ROBIN, 0, torch.tensor([0.5]), torch.tensor([[2]])),
            r"^positions: got torch.float32",
        ),
        (
            lambda: slot_mapping(ROUND_ROBIN, 0, torch.zeros(2, 3).int(), torch.tensor([[2]])),
            r"^block_table: got \(1, 1\)",
        ),
        (
            lambda: slot_mapping(
                Contiguous().bind(ranks=2, block_size=4, local_length=4), 0, torch.tensor([8]), torch.tensor([[2]])
            ),
            r"^position: got 8, expected 0 <= position < 8",
        ),
        (lambda: slot_mapping(ROUND_ROBIN, 7, torch.tensor([0]), torch.tensor([[2]])), r"^rank: got 7"),
        (lambda: slot_mapping(ROUND_ROBIN, 0, torch.tensor([0]), torch.tensor([[2.5]])), r"^block_table: got torch"),
        (lambda: check_slots(torch.tensor([0, -2])), r"^slots\[1\]: got -2"),
        (lambda: owned_positions(ROUND_ROBIN, 0, 4, 2), r"^start, stop: got 4, 2"),
    ],
)
def test_bad_positions_are_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("fp8_packed", [False, True])
@pytest.mark.parametrize(
    ("new", "slots", "argument"),
    [
        (torch.ones(2, 3, 4), [0, 1, 24], "slots[2]"),
        (torch.ones(2, 3, 4), [0, 1, 1], "slots[2]"),
        (torch.ones(2, 3, 4), [0, 1, -2], "slots[2]"),
        (torch.ones(2, 2, 4), [0, 1, 2], "new"),
        (torch.ones(1, 3, 4), [0, 1, 2], "new"),
        (torch.ones(2, 3, 4).half(), [0, 1, 2], "new"),
    ],
)
def test_a_refused_write_leaves_the_cache_alone(
    new: torch.Tensor, slots: list[int], argument: str, fp8_packed: bool
) -> None:
    cache = torch.zeros(4, 2, 3, 4, 2) if fp8_packed else torch.zeros(4, 2, 6, 4)
    with pytest.raises(ArgumentError) as error:
        write_kv_cache(cache, new, torch.tensor(slots), fp8_packed=fp8_packed)
    assert error.value.argument == argument
    assert not cache.any()


def test_wrong_cache_shapes_are_refused() -> None:
    slots = torch.tensor([0])
    for cache, packed in (
        (torch.zeros(4, 6, 4), False),
        (torch.zeros(4, 2, 6, 4), True),
        (torch.zeros(4, 2, 3, 4, 3), True),
    ):
        with pytest.raises(ArgumentError, match=r"^cache: got "):
            read_kv_cache(cache, slots, fp8_packed=packed)
    with pytest.raises(ArgumentTypeError, match=r"^slots: got torch.float32"):
        read_kv_cache(torch.zeros(4, 2, 6, 4), torch.zeros(1))
    with pytest.raises(ArgumentError, match=r"^slots: got \(1, 1\)"):
        read_kv_cache(torch.zeros(4, 2, 6, 4), torch.zeros(1, 1).int())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_packed_and_plain_caches_hold_the_same_bits(dtype: torch.dtype) -> None:
    k = torch.randn(2, 7, 3).to(dtype)
    slots = torch.tensor([0, 5, 1, -1, 23, 10, 11])
    plain = write_kv_cache(torch.zeros(4, 2, 6, 3).to(dtype), k, slots)
    packed = write_kv_cache(torch.zeros(4, 2, 3, 3, 2).to(dtype), k, slots, fp8_packed=True)
    assert torch.equal(pack_fp8_k(plain).float(), packed.float())
    assert torch.equal(unpack_fp8_k(packed).float(), plain.float())
    assert torch.equal(packed[0, :, 2, :, 1].float(), k[:, 1].float()), "slot 5 is [s=2, two=1] of block 0"
    expected = torch.where((slots >= 0)[:, None], k.float(), 0.0)
    for cache, is_packed in ((plain, False), (packed, True)):
        back = read_kv_cache(cache, slots, fp8_packed=is_packed)
        assert back.dtype == dtype
        assert torch.equal(back.float(), expected)
    with pytest.raises(ArgumentError, match=r"^k: got \(1, 5, 3\)"):
        pack_fp8_k(torch.zeros(1, 5, 3))
    with pytest.raises(ArgumentError, match=r"^packed: got \(1, 5, 3\)"):
        unpack_fp8_k(torch.zeros(1, 5, 3))


def test_gradients_flow_through_write_and_read() -> None:
    new = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    slots = torch.tensor([4, -1, 0])

    def through(new: torch.Tensor) -> torch.Tensor:
        cache = write_kv_cache(torch.zeros(2, 2, 4, 2, dtype=torch.float64), new, slots)
        return read_kv_cache(cache, torch.tensor([0, 4, 4, -1]))

    assert torch.autograd.gradcheck(through, (new,))
    assert through(new)[:, 3].eq(0).all()


def test_unread_nan_stays_out() -> None:
    cache = torch.full((1, 1, 2, 2), float("nan"))
    assert read_kv_cache(cache, torch.tensor([-1])).eq(0).all()
