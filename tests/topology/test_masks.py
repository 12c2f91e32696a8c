"""Per-rank masks, scattered back to global positions, sum exactly to the mask of the whole sequence."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from layout_worlds import World, worlds
from test_rank_tensors import steps

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.topology.decode_rank import DecodeRank
from nki_parallel_attn.topology.kv_layout import Contiguous, RoundRobin
from nki_parallel_attn.topology.masks import active_mask, full_mask, shard_full_mask, swap_qk
from nki_parallel_attn.topology.rank_tensors_tkg import pos_ids, swa_start_pos_ids

SETTINGS = settings(max_examples=80, deadline=None)


def dense_mask(
    positions: torch.Tensor, length: int, heads: int, window: int, tree: torch.Tensor | None
) -> torch.Tensor:
    """[length + S_tkg, B, heads, S_tkg] by loops: prior keys by position, then the active tokens."""
    batch, tokens = positions.shape
    mask = torch.zeros(length + tokens, batch, heads, tokens, dtype=torch.int64)
    for b, row in enumerate(positions.tolist()):
        for s, query in enumerate(row):
            for key in range(length if query >= 0 else 0):
                mask[key, b, :, s] = key < row[0] and (not window or query - window < key)
            for j, key in enumerate(row):
                if query < 0 or key < 0:
                    mask[length + j, b, :, s] = j == s
                elif tree is None:
                    mask[length + j, b, :, s] = j <= s and (not window or query - window < key)
                else:
                    mask[length + j, b, :, s] = tree[j, b, :, s]
    return mask


def scatter(world: World, kvdp: int, local_masks: list[torch.Tensor], length: int, tokens: int) -> torch.Tensor:
    """Add up the group's local masks at the global positions of their slots; out of place slots must be hidden."""
    batch = local_masks[0].shape[1]
    total = torch.zeros(length + tokens, batch * kvdp, *local_masks[0].shape[2:], dtype=torch.int64)
    where = {world.locate(p): p for p in range(length)}
    for index, local in enumerate(local_masks):
        cp_rank, kvdp_rank = index // kvdp, index % kvdp
        rows = slice(kvdp_rank * batch, (kvdp_rank + 1) * batch)
        prior = len(local) - tokens
        for slot in range(prior):
            if (cp_rank, slot) in where:
                total[where[cp_rank, slot], rows] += local[slot]
            else:
                assert not local[slot].any()
        total[length:, rows] += local[prior:]
    return total


@st.composite
def cases(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    world = draw(worlds(max_ranks=5, max_block=5, max_local=20))
    kvdp = draw(st.integers(1, 3))
    length = world.ranks * world.local_length
    positions = draw(steps(world, kvdp, limit=length, max_tokens=4))
    batch, tokens = positions.shape
    heads = draw(st.integers(1, 3))
    tree = None
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
        tree = torch.randint(0, 2, (tokens, batch, draw(st.sampled_from([1, heads])), tokens), generator=generator)
    ranks = [DecodeRank.from_index(world.layout, index, kvdp) for index in range(world.ranks * kvdp)]
    window = draw(st.sampled_from([0, 0, 1, 2, 7, 30]))
    bucket = max(world.layout.filled_slots(0, max(0, int(positions[:, 0].max()))) + tokens, tokens)
    return world, kvdp, length, positions, heads, tree, ranks, window, bucket + draw(st.integers(0, 3))


@SETTINGS
@given(cases(), st.booleans())
def test_full_masks_sum_to_the_global_mask(case, swapped: bool) -> None:  # type: ignore[no-untyped-def]
    world, kvdp, length, positions, heads, tree, ranks, window, s_ctx = case
    tokens = positions.shape[1]
    expected = dense_mask(positions, length, heads, window, tree)
    local_masks = []
    for rank in ranks:
        mask = full_mask(rank, positions, heads, s_ctx, tree=tree, sliding_window=window, is_qk_swapped=swapped)
        assert mask.dtype == torch.uint8
        assert mask.is_contiguous()
        batch = len(positions) // kvdp
        assert mask.shape == ((batch, heads, tokens, s_ctx) if swapped else (s_ctx, batch, heads, tokens))
        local_masks.append(mask.permute(3, 0, 1, 2) if swapped else mask)
    assert torch.equal(scatter(world, kvdp, local_masks, length, tokens), expected)

    # Cutting the global mask up gives the same parts, in either layout.
    whole = expected.to(torch.uint8)
    for rank, mask in zip(ranks, local_masks, strict=True):
        if swapped:
            part = shard_full_mask(rank, swap_qk(whole), positions, s_ctx, is_qk_swapped=True).permute(3, 0, 1, 2)
        else:
            part = shard_full_mask(rank, whole, positions, s_ctx)
        assert part.dtype == torch.uint8
        assert torch.equal(part, mask)


@SETTINGS
@given(cases(), st.integers(0, 999))
def test_any_global_mask_survives_sharding(case, seed: int) -> None:  # type: ignore[no-untyped-def]
    world, kvdp, length, positions, heads, _, ranks, _, _ = case
    tokens = positions.shape[1]
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 2, (length + tokens, len(positions), heads, tokens), generator=generator)
    parts = [shard_full_mask(rank, whole, positions, world.local_length + tokens) for rank in ranks]
    assert torch.equal(scatter(world, kvdp, parts, length, tokens), whole)


@SETTINGS
@given(cases())
def test_pos_ids_with_an_active_mask_say_what_the_full_mask_says(case) -> None:  # type: ignore[no-untyped-def]
    _, kvdp, _, positions, heads, tree, ranks, window, s_ctx = case
    tokens = positions.shape[1]
    group_sum = torch.zeros(tokens, len(positions), heads, tokens, dtype=torch.int64)
    for rank in ranks:
        rows = rank.batch_rows(len(positions))
        active = active_mask(rank, positions, heads, tree=tree, sliding_window=window)
        assert (active.shape, active.dtype) == ((tokens, len(positions) // kvdp, heads, tokens), torch.uint8)
        full = full_mask(rank, positions, heads, s_ctx, tree=tree, sliding_window=window)
        assert torch.equal(full[s_ctx - tokens :], active)
        ends = pos_ids(rank, positions)[:, :1]
        starts = swa_start_pos_ids(rank, positions, window) if window else torch.zeros_like(ends)
        slots = torch.arange(s_ctx - tokens)[:, None, None]
        prior = (slots >= starts) & (slots < ends)
        real = positions[rows] >= 0
        assert torch.equal(full[: s_ctx - tokens, :, 0][:, real].bool(), prior.expand(-1, -1, tokens)[:, real])
        group_sum[:, rows] += active
    if tree is None:
        # Every token sees itself exactly once over the group; nothing is seen twice.
        assert (group_sum.diagonal(dim1=0, dim2=3) == 1).all()
        assert group_sum.max() == 1


def test_a_completely_full_shard_names_the_bucket_on_every_rank() -> None:
    layout = RoundRobin().bind(ranks=2, block_size=4)
    positions = torch.tensor([[8, 9], [4, 5]])  # row 0: both ranks hold 4 prior tokens
    for index in range(4):
        rank = DecodeRank.from_index(layout, index, kvdp=2)
        with pytest.raises(ArgumentError, match=r"^s_ctx: got 4, expected at least 6.*s_ctx=8 fits, or pass pos_ids"):
            full_mask(rank, positions, 2, 4)
        assert full_mask(rank, positions, 2, 8).shape == (8, 1, 2, 2)
        assert active_mask(rank, positions, 2).shape == (2, 1, 2, 2)
    whole = torch.zeros(18, 2, 2, 2)
    assert not shard_full_mask(rank, whole, positions, 4).any()
    whole[5, 0] = 1  # rank 1 holds position 5 in slot 1, and a bucket of 3 has one row beside the active ones
    with pytest.raises(ArgumentError, match=r"^s_ctx: got 3"):
        shard_full_mask(rank, whole, positions, 3)


def test_bad_masks_are_named() -> None:
    rank = DecodeRank(Contiguous().bind(ranks=2, block_size=2, local_length=4))
    positions = torch.tensor([[3, 4]])
    with pytest.raises(ArgumentError, match=r"^tree: got \(2, 1, 2\)"):
        active_mask(rank, positions, 4, tree=torch.ones(2, 1, 2))
    with pytest.raises(ArgumentError, match=r"^tree: got \(2, 1, 3, 2\), expected 1 or q_heads_attn=4"):
        active_mask(rank, positions, 4, tree=torch.ones(2, 1, 3, 2))
    for shape in ((6, 1, 4), (6, 2, 4, 2), (6, 1, 4, 1), (1, 1, 4, 2)):
        with pytest.raises(ArgumentError, match=r"^mask: got "):
            shard_full_mask(rank, torch.ones(shape), positions, 8)
    with pytest.raises(ArgumentError, match=r"^mask: got .*\[B, q_heads_attn, S_tkg, S \+ S_tkg\]"):
        shard_full_mask(rank, torch.ones(6, 1, 4, 2), positions, 8, is_qk_swapped=True)
    with pytest.raises(ArgumentError, match=r"^position: got 8"):
        full_mask(rank, torch.tensor([[7, 8]]), 4, 8)
    with pytest.raises(ArgumentError, match=r"^length: got 9"):
        shard_full_mask(rank, torch.zeros(11, 1, 4, 2), positions, 8)
