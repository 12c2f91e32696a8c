"""Moving a cache from one plan's ranks to another's: each rank sends exactly the KV that its peer lacks.

A rank of the new plan needs some sequences, KV heads and positions; what it holds already it keeps, the rest comes from
one holder of each. For sender s and receiver t, the tokens of one head of one sequence that s sends are the positions
below the sequence's length that the old plan gives to s and the new plan to t. Bytes, K and V of all layers:

    2 * layers * head_dim * itemsize * (heads and sequences of both) * (such positions)

Where several KV groups hold the same head, a receiver takes it from its own group, or from the one in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn.backends.process_groups import process_group_for
from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, PlanError
from nki_parallel_attn.kernels.collectives_torch import DistributedExchange
from nki_parallel_attn.ops.rank_agreement import agree
from nki_parallel_attn.plan_cache_pair import check_same_model
from nki_parallel_attn.topology.block_tables import ABSENT, check_block_table

if TYPE_CHECKING:
    from nki_parallel_attn.plan import ShardingPlan
    from nki_parallel_attn.plan_rank import RankView


@dataclass(frozen=True)
class Redistribution:
    """Bytes of K and V over all layers, by rank of one model copy.

    Attributes:
        sent, received: what each rank exchanges with its peers.
        held: what each rank holds of the sequences afterwards, without unused slots.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    held: tuple[int, ...]


class Redistributed(NamedTuple):
    """Caches of the new plan, and the bytes that this rank sent to make them."""

    caches: list[Tensor]
    bytes_sent: int


def redistribution(
    plan: ShardingPlan, source: ShardingPlan, lengths: Sequence[int], dtype: torch.dtype
) -> Redistribution:
    """See `ShardingPlan.redistribution`."""
    check_same_model(plan, source)
    lengths = _check_lengths(plan, source, lengths)
    token = 2 * plan.shape.layers * plan.shape.head_dim * dtype.itemsize
    crossings = {length: _crossings(plan, source, length) for length in set(lengths)}
    sent, received, held = ([0] * plan.tp for _ in range(3))
    for sender in range(plan.tp):
        for receiver in range(plan.tp):
            rows, heads = _shared(plan, source, sender, receiver, len(lengths))
            place = source.rank(sender).sequence_index, plan.rank(receiver).sequence_index
            nbytes = token * len(heads) * sum(int(crossings[lengths[row]][place]) for row in rows)
            held[receiver] += nbytes
            if sender != receiver:
                sent[sender] += nbytes
                received[receiver] += nbytes
    return Redistribution(tuple(sent), tuple(received), tuple(held))


@torch.no_grad()
def redistribute(
    plan: ShardingPlan,
    source: ShardingPlan,
    caches: Sequence[Tensor],
    lengths: Sequence[int],
    block_table: Tensor | None,
) -> Redistributed:
    """See `ShardingPlan.redistribute`."""
    ranks, fields, error = None, {}, None
    try:
        ranks = plan.rank(_this_rank(plan)).group_ranks("tp")
        check_same_model(plan, source)
        lengths = _check_lengths(plan, source, lengths)
        old, new = (each.rank(_this_rank(each)) for each in (source, plan))
        old_table = _check_caches(old, caches, lengths, block_table)
        fields = {"plan": plan.to_json(), "source": source.to_json(), "lengths": lengths}
        fields["caches"] = [str(cache.dtype) for cache in caches]
    except Exception as problem:
        error = problem
    agree("redistribute", ranks, fields, error, "always")
    assert ranks is not None

    width = plan.blocks_per_sequence(plan.max_seq_len or max(1, *lengths))
    new_table = torch.arange(plan.batch_per_rank(len(lengths)) * width).view(-1, width)
    outgoing, incoming = [], []
    for peer in ranks:
        gives = _shared(plan, source, old.rank, peer, len(lengths))
        takes = _shared(plan, source, peer, new.rank, len(lengths))
        outgoing.append(_slots(old, plan.rank(peer), gives, old_table, lengths).to(caches[0].device))
        incoming.append(_slots(new, source.rank(peer), takes, new_table, lengths).to(caches[0].device))
    exchange = DistributedExchange(process_group_for(ranks) if len(ranks) > 1 else None, caches[0].device)
    moved = [torch.zeros(new.cache_shape(new_table.numel()), dtype=c.dtype, device=c.device) for c in caches]
    for cache, target in zip(caches, moved, strict=True):
        old_rows, new_rows = (_as_bytes(t).reshape(-1, t.shape[-1]) for t in (cache, target))
        arrived = exchange.swap_uneven(
            [old_rows.index_select(0, index) for index in outgoing],
            [old_rows.new_empty(len(index), old_rows.shape[1]) for index in incoming],
        )
        for index, tokens in zip(incoming, arrived, strict=True):
            new_rows.index_copy_(0, index, tokens)
    return Redistributed(moved, exchange.traffic().get("all_to_all", 0))


def _crossings(plan: ShardingPlan, source: ShardingPlan, length: int) -> Tensor:
    """[source ranks of a sequence, plan's] int64: of `length` positions, how many go from each to each."""
    positions = torch.arange(length)
    pairs = source.layout.owner(positions) * plan.sequence_ranks + plan.layout.owner(positions)
    counts = torch.bincount(pairs, minlength=source.sequence_ranks * plan.sequence_ranks)
    return counts.view(source.sequence_ranks, plan.sequence_ranks)


def _shared(
    plan: ShardingPlan, source: ShardingPlan, sender: int, receiver: int, batch: int
) -> tuple[range, list[int]]:
    """Sequences and KV heads of which world rank `sender` gives `receiver` tokens, or keeps where they are the same."""
    old, new = source.rank(sender), plan.rank(receiver)
    theirs, ours = old.batch_slice(batch), new.batch_slice(batch)
    rows = range(max(theirs.start, ours.start), min(theirs.stop, ours.stop))
    # Of groups with copies of the same heads, the receiver's own gives: what the receiver holds it keeps.
    copies = max(1, source.kv_groups // source.shape.kv_heads)
    gives = old.kv_group % copies == source.rank(receiver).kv_group % copies
    return rows, [head for head in new.kv_heads if gives and head in old.kv_heads]


def _slots(
    view: RankView, peer: RankView, shared: tuple[range, list[int]], table: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Where the tokens that go between `view` and `peer`, a rank of the other plan, lie in the cache of `view`.

    Returns:
        int64 [tokens * heads], rows of the cache seen as [num_blocks * kv_heads * block_size, head_dim]; in the same
        order on both sides.
    """
    rows, heads = shared
    if not rows or not heads:
        return torch.empty(0, dtype=torch.int64)
    layout, size = view.plan.layout, view.plan.block_size
    positions = torch.arange(max(lengths[row] for row in rows))
    both = (layout.owner(positions) == view.sequence_index) & (peer.plan.layout.owner(positions) == peer.sequence_index)
    positions = positions[both]
    local = torch.tensor([head - view.kv_heads.start for head in heads])[:, None]
    first = view.batch_slice(len(lengths)).start
    parts = []
    for row in rows:
        slots = layout.slot(positions[positions < lengths[row]])
        entries = table[row - first, slots // size] * view.plan.kv_heads_per_rank + local
        parts.append((entries * size + slots % size).reshape(-1))
    return torch.cat(parts)


def _check_lengths(plan: ShardingPlan, source: ShardingPlan, lengths: Sequence[int]) -> list[int]:
    if not isinstance(lengths, Sequence):
        raise ArgumentTypeError("lengths", type(lengths).__name__, "a list of the tokens of each sequence")
    for each in (plan, source):
        each.batch_per_rank(len(lengths))
        for length in lengths:
            each.layout.local_slots(each.length(length))
    return list(lengths)


def _check_caches(
    view: RankView, caches: Sequence[Tensor], lengths: Sequence[int], block_table: Tensor | None
) -> Tensor:
    """The table of physical blocks [B/kvdp, max_blocks] int64, after a check of every cache."""
    if not isinstance(caches, Sequence):
        raise ArgumentTypeError("caches", type(caches).__name__, "a list of tensors")
    if not caches:
        raise ArgumentError("caches", "no tensor", "K and V caches of the source plan")
    for index, cache in enumerate(caches):
        name = f"caches[{index}]"
        if not isinstance(cache, Tensor) or cache.layout != torch.strided:
            got = str(cache.layout) if isinstance(cache, Tensor) else type(cache).__name__
            raise ArgumentTypeError(name, got, "a dense tensor")
        if cache.ndim != 4 or tuple(cache.shape) != view.cache_shape(len(cache)):
            raise ArgumentError(name, tuple(cache.shape), f"{view.cache_shape(len(cache))}, blocks of the source plan")
        if len(cache) != len(caches[0]) or cache.device != caches[0].device:
            expected = f"{len(caches[0])} blocks on {caches[0].device} as caches[0]"
            raise ArgumentError(name, f"{len(cache)} blocks on {cache.device}", expected)
    held = lengths[view.batch_slice(len(lengths))]
    needed = [view.blocks_held(length) for length in held]
    if block_table is None:
        if len(caches[0]) % len(held) or len(caches[0]) // len(held) < max(needed):
            expected = f"{len(held)} sequences' blocks in order, at least {max(needed)} of each"
            raise ArgumentError("caches", f"{len(caches[0])} blocks", expected)
        return torch.arange(len(caches[0])).view(len(held), -1)
    if not isinstance(block_table, Tensor) or block_table.device.type == "meta":
        got = "a tensor on meta" if isinstance(block_table, Tensor) else type(block_table).__name__
        raise ArgumentTypeError("block_table", got, "a tensor of block numbers")
    check_block_table(block_table, len(caches[0]), argument="block_table")
    if block_table.ndim != 2 or len(block_table) != len(held) or block_table.shape[1] < max(needed):
        expected = f"[{len(held)}, at least {max(needed)}]"
        raise ArgumentError("block_table", tuple(block_table.shape), expected)
    table = block_table.to("cpu", torch.int64)
    for row, blocks in enumerate(needed):
        if bool((table[row, :blocks] == ABSENT).any()):
            raise ArgumentError(f"block_table[{row}]", table[row].tolist(), f"{blocks} blocks, none absent")
    return table


def _this_rank(plan: ShardingPlan) -> int:
    """This process's rank; raises PlanError where the plan's world is another one."""
    started = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if started else 1
    if size != plan.world_size:
        raise PlanError("world_size is the number of running ranks", f"world_size={plan.world_size}, {size} ranks")
    return dist.get_rank() if started else 0


def _as_bytes(cache: Tensor) -> Tensor:
    """float8 as its bytes: torch indexes few float8 formats on few devices."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache
