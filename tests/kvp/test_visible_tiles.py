"""The tiles of a rank hold exactly the (query, key) pairs that the layout makes visible, each once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte_torch import _head_chunks
from nki_parallel_attn.kernels.paged_kv_torch import contiguous_slots, round_robin_slots
from nki_parallel_attn.kernels.visible_tiles_torch import (
    MAX_FUSED_ROWS,
    MIN_FUSED_ROWS,
    RowTile,
    VisibleSlots,
    tile_mask,
    visible_tiles,
)


def pairs_of_tiles(visible: VisibleSlots, heads: int, kv_heads: int) -> torch.Tensor:
    """[S, L] how often each pair occurs."""
    counts = torch.zeros(len(visible.stop), max(1, int(visible.stop[-1])), dtype=torch.int64)
    for tile in visible_tiles(visible, heads, kv_heads):
        rows = torch.arange(len(visible.stop))[tile.rows][:, None]
        if tile.unmasked:
            counts[rows, torch.arange(tile.unmasked.start, tile.unmasked.stop)] += 1
        if tile.causal:
            keys = torch.arange(tile.causal.start, tile.causal.stop)
            assert len(keys) == len(rows)
            counts[rows, keys] += torch.ones(len(rows), len(keys), dtype=torch.int64).tril()
        for keys in tile.masked:
            counts[rows, torch.arange(keys.start, keys.stop)] += tile_mask(tile, keys, visible).to(torch.int64)
    return counts


layouts = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 8),
        "block_size": st.sampled_from([1, 2, 16, 64, 128]),
        "prior": st.integers(0, 1500),
        "rows": st.integers(1, 1500),
        "window": st.one_of(st.just(0), st.integers(1, 3000)),
        "heads": st.sampled_from([(1, 1), (8, 1), (8, 2), (64, 8), (6, 6)]),
    }
)


def visible_by_position(key_positions: torch.Tensor, prior: int, rows: int, window: int) -> torch.Tensor:
    queries = torch.arange(prior, prior + rows)[:, None]
    visible = key_positions <= queries
    return visible & (key_positions > queries - window) if window else visible


@settings(max_examples=150, deadline=None)
@given(layouts, st.data())
def test_round_robin(layout, data):
    ranks, block = layout["ranks"], layout["block_size"]
    rank = data.draw(st.integers(0, ranks - 1))
    visible = round_robin_slots(layout["rows"], layout["prior"], rank, ranks, block, layout["window"])
    counts = pairs_of_tiles(visible, *layout["heads"])
    slots = torch.arange(counts.shape[1])
    positions = (slots // block * ranks + rank) * block + slots % block
    expected = visible_by_position(positions, layout["prior"], layout["rows"], layout["window"])
    assert torch.equal(counts, expected.to(torch.int64))


@settings(max_examples=100, deadline=None)
@given(layouts, st.data())
def test_contiguous(layout, data):
    rank = data.draw(st.integers(0, layout["ranks"] - 1))
    length = data.draw(st.integers(1, 1000))
    offset = layout["prior"] - rank * length
    visible = contiguous_slots(layout["rows"], offset, length, layout["window"])
    counts = pairs_of_tiles(visible, *layout["heads"])
    positions = torch.arange(counts.shape[1]) + rank * length
    expected = visible_by_position(positions, layout["prior"], layout["rows"], layout["window"])
    assert torch.equal(counts, expected.to(torch.int64) * (torch.arange(counts.shape[1]) < length))


def test_round_robin_without_window_takes_no_mask_and_few_large_calls():
    for ranks in (2, 4):
        visible = round_robin_slots(8192, 0, 1, ranks, 128, 0)
        tiles = visible_tiles(visible, 8, 1)
        assert not any(tile.masked for tile in tiles)
        assert len(tiles) <= 8192 // (128 * ranks) + 1
        assert sum(tile.causal is not None for tile in tiles) == 1
        rows = [tile.count * 8 for tile in tiles if not tile.causal]
        assert min(rows) >= MIN_FUSED_ROWS and max(rows) <= MAX_FUSED_ROWS


def test_small_blocks_are_joined_to_large_calls():
    tiles = visible_tiles(round_robin_slots(4096, 0, 0, 4, 16, 0), 8, 1)
    assert len(tiles) < 50  # 64 diagonals


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (8, 2), (64, 8), (6, 6), (12, 4)])
@pytest.mark.parametrize("rows", [1, 300, 1500, 5000])
@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_calls_hold_each_head_once_and_causal_ones_keep_the_threads_busy(heads, kv_heads, rows, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for causal in (None, slice(0, rows)):
            chunks = list(_head_chunks(RowTile(slice(0, rows), causal=causal), heads, kv_heads))
            assert [head for chunk, _ in chunks for head in range(heads)[chunk]] == list(range(heads))
            group = heads // kv_heads
            for chunk, kv in chunks:
                own = [head // group for head in range(heads)[chunk]]
                assert sorted(set(own)) == list(range(kv_heads)[kv])
                count = len(own)
                assert len(set(own)) == 1 or count == len(set(own)) * group, (
                    "a call of several KV heads holds all of each"
                )
                assert count * rows <= max(MAX_FUSED_ROWS, rows * (threads if causal else 1))
                if causal and threads <= group and chunk.stop % group:
                    assert count >= threads
    finally:
        torch.set_num_threads(before)
