"""Every rank tensor of the prefill and decode pages against counts over the layout's definition."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from layout_worlds import World, worlds

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.topology import rank_tensors_cte as cte
from nki_parallel_attn.topology import rank_tensors_tkg as tkg
from nki_parallel_attn.topology.block_tables import active_blocks_table
from nki_parallel_attn.topology.decode_rank import DecodeRank, check_positions
from nki_parallel_attn.topology.kv_layout import Contiguous, Interleaved, RoundRobin

SKIP = 2**32 - 1
MANY = settings(max_examples=100, deadline=None)

CONTIGUOUS = Contiguous().bind(ranks=4, block_size=4, local_length=8)
ROUND_ROBIN = RoundRobin().bind(ranks=4, block_size=4)
TOKENS = Interleaved(1).bind(ranks=4, block_size=4)


def capacity(world: World, limit: int) -> int:
    return limit if world.interleave is not None else min(limit, world.ranks * world.local_length)


# Prefill.


@MANY
@given(worlds(max_local=256), st.data())
def test_kvp_q_offset_makes_the_page_s_visibility_rule_true(world: World, data: st.DataObject) -> None:
    if world.interleave not in (None, world.block_size):
        for call in (
            lambda: cte.kvp_q_offset(world.layout, 0, 0),
            lambda: cte.kvp_rank_id(world.layout, 0),
            lambda: cte.kvp_group_size(world.layout),
            lambda: cte.valid_num_prior_tokens(world.layout, 0, 0),
        ):
            with pytest.raises(ArgumentError, match=r"^layout: "):
                call()
        return
    rank = data.draw(st.integers(0, world.ranks - 1))
    q_pos = data.draw(st.integers(0, capacity(world, 2**31) - 1))
    offset = cte.kvp_q_offset(world.layout, rank, q_pos)
    assert (offset.shape, offset.dtype) == ((1, 1), torch.int32)
    assert cte.kvp_rank_id(world.layout, rank).tolist() == [[rank]]
    if world.interleave is None:
        assert cte.kvp_group_size(world.layout) == 0
        for slot in {0, world.local_length // 2, world.local_length - 1}:
            for token in (0, 1, world.local_length):
                visible = world.layout.position(rank, slot) <= q_pos + token
                assert visible == (slot <= offset.item() + token)
    else:
        assert cte.kvp_group_size(world.layout) == world.ranks
        assert offset.item() == q_pos


@MANY
@given(worlds(max_ranks=40, max_local=64), st.integers(0, 3000), st.data())
def test_valid_num_prior_tokens_counts_whole_visible_blocks(world: World, q_pos: int, data: st.DataObject) -> None:
    if world.interleave != world.block_size:
        return
    rank, b = data.draw(st.integers(0, world.ranks - 1)), world.block_size
    prior = cte.valid_num_prior_tokens(world.layout, rank, q_pos)
    assert (prior.shape, prior.dtype) == ((1, 1), torch.int32)
    blocks = [g for g in range(rank, q_pos // b + 1, world.ranks) if (g + 1) * b - 1 <= q_pos]
    assert prior.item() == len(blocks) * b
    assert prior.item() % b == 0


def test_prefill_int32_limits_and_errors() -> None:
    big = Contiguous().bind(ranks=4096, block_size=128, local_length=2**20)
    assert cte.kvp_q_offset(big, 2047, 0).item() == -2047 * 2**20
    assert cte.kvp_q_offset(big, 2048, 0).item() == -(2**31)
    with pytest.raises(ArgumentError, match=r"^kvp_q_offset: got -2148532224"):
        cte.kvp_q_offset(big, 2049, 0)
    assert cte.kvp_q_offset(ROUND_ROBIN, 3, 2**31 - 1).item() == 2**31 - 1
    for q_pos in (-1, 2**31, 1.0, True):
        with pytest.raises(ArgumentError, match=r"^q_pos: got "):
            cte.kvp_q_offset(ROUND_ROBIN, 3, q_pos)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"^q_pos: got "):
            cte.global_q_offset(q_pos)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^rank: got 4"):
        cte.kvp_rank_id(ROUND_ROBIN, 4)
    with pytest.raises(ArgumentError, match="apc_mode needs kvp_group_size > 0"):
        cte.valid_num_prior_tokens(CONTIGUOUS, 0, 0)
    assert cte.global_q_offset(640) == 640
    assert cte.global_q_offset(640, apc_mode=True) == 0


# Decode.


@st.composite
def steps(draw: st.DrawFn, world: World, kvdp: int, limit: int = 2**31, max_tokens: int = 5) -> torch.Tensor:
    """[B, S_tkg] positions: consecutive tokens, some rows shortened or empty by padding."""
    tokens = min(draw(st.integers(1, max_tokens)), capacity(world, limit))
    rows = []
    for _ in range(kvdp * draw(st.integers(1, 3))):
        first = draw(st.integers(0, capacity(world, limit) - tokens))
        real = draw(st.sampled_from([tokens, tokens, draw(st.integers(0, tokens))]))
        rows.append([first + s if s < real else -1 for s in range(tokens)])
    return torch.tensor(rows, dtype=draw(st.sampled_from([torch.int64, torch.int32])))


@MANY
@given(st.data())
def test_pos_ids_and_window_starts_are_counts_of_local_positions(data: st.DataObject) -> None:
    world = data.draw(worlds(max_local=64))
    kvdp = data.draw(st.integers(1, 3))
    positions = data.draw(steps(world, kvdp, limit=2000))
    window = data.draw(st.integers(1, 100))
    cp_rank, kvdp_rank = data.draw(st.integers(0, world.ranks - 1)), data.draw(st.integers(0, kvdp - 1))
    rank = DecodeRank(world.layout, cp_rank, kvdp, kvdp_rank)
    owned = [p for p in range(2000) if world.interleave is not None or p < world.ranks * world.local_length]
    owned = [p for p in owned if world.locate(p)[0] == cp_rank]
    batch = len(positions) // kvdp
    own = positions[kvdp_rank * batch : (kvdp_rank + 1) * batch].tolist()

    ids, starts = tkg.pos_ids(rank, positions), tkg.swa_start_pos_ids(rank, positions, window)
    for tensor in (ids, starts):
        assert (tensor.shape, tensor.dtype) == ((batch, positions.shape[1]), torch.int32)
    assert ids.tolist() == [[sum(k < p for k in owned) for p in row] for row in own]
    for b, row in enumerate(own):
        for s, p in enumerate(row):
            seen = [world.locate(k)[1] for k in owned if p - window < k < row[0]] if p >= 0 else []
            if p >= 0:
                assert list(range(starts[b, s], ids[b, 0])) == seen
            else:
                assert starts[b, s] == 0
    longest = tkg.max_context_len(rank, positions)
    assert (longest.shape, longest.dtype) == ((1,), torch.int32)
    assert longest.item() == max(sum(k < row[0] for k in owned) for row in own)


@MANY
@given(st.data())
def test_each_active_token_is_written_once_over_the_group_in_a_block_cache(data: st.DataObject) -> None:
    world = data.draw(worlds(max_ranks=5, max_block=6, max_local=40))
    kvdp, kv_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    positions = data.draw(steps(world, kvdp, limit=world.ranks * world.local_length, max_tokens=9))
    batch, tokens = len(positions) // kvdp, positions.shape[1]
    b, width = world.block_size, world.local_length // world.block_size
    writes = torch.zeros(positions.shape, dtype=torch.int64)
    for index in range(world.ranks * kvdp):
        rank = DecodeRank.from_index(world.layout, index, kvdp)
        assert (rank.cp_rank, rank.kvdp_rank) == (index // kvdp, index % kvdp)
        first = rank.kvdp_rank * batch
        sequences = torch.randperm(batch * width).reshape(batch, width).tolist()
        table = active_blocks_table(sequences, width + 1, batch * width)
        update = tkg.block_kv_cache_update_idx(rank, positions, table, kv_heads)
        assert update.dtype == torch.uint32
        assert update.shape == ((batch, tokens) if kv_heads == 1 else (batch, kv_heads, tokens))
        per_head = update.to(torch.int64).reshape(batch, kv_heads, tokens)
        for row in range(batch):
            for token in range(tokens):
                p = int(positions[first + row, token])
                owner, slot = world.locate(p) if p >= 0 else (-1, -1)
                block = sequences[row][slot // b] if owner == rank.cp_rank else -1
                for head in range(kv_heads):
                    expected = SKIP if block < 0 else (block * kv_heads + head) * b + slot % b
                    assert per_head[row, head, token] == expected
                writes[first + row, token] += block >= 0
    assert torch.equal(writes, (positions >= 0).long())


@MANY
@given(st.data())
def test_each_row_starts_once_over_the_group_in_a_flat_cache(data: st.DataObject) -> None:
    world = data.draw(worlds(max_ranks=5, max_block=8, max_local=64))
    kvdp = data.draw(st.integers(1, 3))
    positions = data.draw(steps(world, kvdp, limit=world.ranks * world.local_length, max_tokens=4))
    positions = torch.where((positions < 0).any(1, keepdim=True), -1, positions)
    tokens, batch = positions.shape[1], len(positions) // kvdp
    ranks = [DecodeRank.from_index(world.layout, index, kvdp) for index in range(world.ranks * kvdp)]
    owners = [{world.locate(p)[0] for p in row} for row in positions.tolist() if row[0] >= 0]
    if any(len(o) > 1 for o in owners):
        for rank in ranks:
            with pytest.raises(ArgumentError, match="use block KV"):
                tkg.flat_kv_cache_update_idx(rank, positions, world.local_length)
        return
    starts = torch.zeros(len(positions), dtype=torch.int64)
    for rank in ranks:
        update = tkg.flat_kv_cache_update_idx(rank, positions, world.local_length)
        assert (update.shape, update.dtype) == ((batch, 1), torch.uint32)
        for row, start in enumerate(update.to(torch.int64)[:, 0].tolist(), rank.kvdp_rank * batch):
            first = int(positions[row, 0])
            if start != SKIP:
                starts[row] += 1
                assert [(rank.cp_rank, start + s) for s in range(tokens)] == [
                    world.locate(first + s) for s in range(tokens)
                ]
    assert torch.equal(starts, (positions[:, 0] >= 0).long())


def test_a_flat_cache_that_is_too_short_raises_on_every_rank() -> None:
    for index in range(4):
        with pytest.raises(
            ArgumentError, match=r"^positions\[1\]: got local slots 4 to 5, expected slots below s_max_ctx=5"
        ):
            tkg.flat_kv_cache_update_idx(DecodeRank(ROUND_ROBIN, index), torch.tensor([[0, 1], [16, 17]]), 5)


def test_a_row_of_padding_needs_no_room_in_a_flat_cache() -> None:
    rank = DecodeRank(Contiguous().bind(ranks=2, block_size=1, local_length=2))
    assert tkg.flat_kv_cache_update_idx(rank, torch.tensor([[-1, -1], [0, 1]]), 2).tolist() == [[SKIP], [0]]
    assert tkg.flat_kv_cache_update_idx(rank, torch.tensor([[-1, -1, -1]]), 2).tolist() == [[SKIP]]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 2]], r"^positions\[0\]: got \[0, 2\], expected consecutive"),
        ([[0, -1]], r"^positions\[0\]: got \[0, -1\], expected consecutive"),
        ([[0, 1], [3, 4]], r"^positions\[1\]: got \[3, 4\] owned by CP ranks \[0, 1\]"),
    ],
)
def test_rows_a_flat_cache_cannot_take(positions: list[list[int]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        tkg.flat_kv_cache_update_idx(DecodeRank(ROUND_ROBIN, 2), torch.tensor(positions), 64)


def test_small_decode_tensors() -> None:
    rank = DecodeRank.from_index(ROUND_ROBIN, 7, kvdp=2)
    assert tkg.kvdp_rank(rank).dtype == torch.uint32
    assert tkg.kvdp_rank(rank).tolist() == [1]
    assert (rank.cp, rank.cp_rank) == (4, 3)
    assert rank.batch_rows(6) == slice(3, 6)
    # One token at position 16 needs a second block per rank; contiguous shards are one piece.
    assert [tkg.s_ctx(ROUND_ROBIN, torch.tensor([[p], [-1]])) for p in (0, 15, 16)] == [4, 4, 8]
    assert tkg.s_ctx(CONTIGUOUS, torch.tensor([[0]])) == 8
    assert tkg.s_ctx(ROUND_ROBIN, torch.tensor([[-1]])) == 0
    near = DecodeRank(RoundRobin().bind(ranks=1, block_size=128))
    assert tkg.pos_ids(near, torch.tensor([[2**31 - 1]])).item() == 2**31 - 1
    with pytest.raises(ArgumentError, match=r"^positions: got 2147483648"):
        tkg.pos_ids(near, torch.tensor([[2**31]]))
    with pytest.raises(ArgumentError, match=r"^sliding_window: got 0"):
        tkg.swa_start_pos_ids(near, torch.tensor([[5]]), 0)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_group_sink_follows_the_gathered_head_order(groups: int, cp: int, kvdp: int, q_heads: int) -> None:
    size = cp * kvdp
    sink = torch.arange(groups * size * q_heads, dtype=torch.float32)
    for group in range(groups):
        # A rank's heads start at (group*G + index)*q_heads_per_rank, with index = cp_rank*kvdp + kvdp_rank.
        gathered = torch.zeros(size * q_heads, 1)
        for index in range(size):
            cp_rank, kvdp_rank = index // kvdp, index % kvdp
            for h in range(q_heads):
                gathered[cp_rank * q_heads * kvdp + kvdp_rank * q_heads + h] = (group * size + index) * q_heads + h
        assert torch.equal(tkg.group_sink(sink, group, groups), gathered)
        assert torch.equal(tkg.group_sink(sink[:, None], group, groups), gathered)


@pytest.mark.parametrize(
    ("shape", "group", "groups", "argument"), [((4, 2), 0, 2, "sink"), ((4,), 2, 2, "group"), ((4,), 0, 3, "group")]
)
def test_group_sink_errors(shape: tuple[int, ...], group: int, groups: int, argument: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{argument}: "):
        tkg.group_sink(torch.zeros(shape), group, groups)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor([1, 2]), r"^positions: got \(2,\), expected \[B, S_tkg\]"),
        (torch.empty(0, 1, dtype=torch.int64), r"^positions: got \(0, 1\)"),
        (torch.tensor([[3], [-2]]), r"^positions\[1, 0\]: got -2"),
        (torch.tensor([[3, -1, 5]]), r"^positions\[0, 2\]: got 5, expected padding"),
        (torch.tensor([[3, 4, 2]]), r"^positions\[0, 2\]: got 2, expected at least the row's first"),
    ],
)
def test_bad_positions_are_named(positions: torch.Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_positions(positions)


def test_bad_places_are_named() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^positions: got torch.float32"):
        check_positions(torch.zeros(1, 1))
    with pytest.raises(ArgumentError, match=r"^cp_rank: got 4"):
        DecodeRank(TOKENS, 4)
    with pytest.raises(ArgumentError, match=r"^kvdp_rank: got 2"):
        DecodeRank(TOKENS, 0, kvdp=2, kvdp_rank=2)
    with pytest.raises(ArgumentError, match=r"^batch: got 3, expected a multiple of kvdp=2"):
        tkg.pos_ids(DecodeRank(TOKENS, 0, kvdp=2), torch.zeros(3, 1).int())
    for index in range(2):  # in the other rank's half of the batch, and still an error on both
        with pytest.raises(ArgumentError, match=r"^position: got 32, expected 0 <= position < 32"):
            tkg.pos_ids(DecodeRank(CONTIGUOUS, 1, 2, index), torch.tensor([[0], [32]]))
