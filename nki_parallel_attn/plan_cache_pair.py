"""Two plans over one cache: whether what one wrote the other can read where it lies.

Prefill with kvp=G and decoding with cp=G under RoundRobin are such a pair: same heads, owner and slot everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nki_parallel_attn.errors import ArgumentTypeError, PlanError
from nki_parallel_attn.topology.kv_layout import BoundLayout, ContiguousShards

if TYPE_CHECKING:
    from nki_parallel_attn.plan import ShardingPlan


def check_same_model(one: ShardingPlan, other: ShardingPlan) -> None:
    """Return when both plans deal the heads of one model over the ranks of the same copies.

    Raises:
        ArgumentTypeError: the other is no plan.
        PlanError: shape, world_size or tp differs.
    """
    if not isinstance(other, type(one)):
        raise ArgumentTypeError("the other plan", type(other).__name__, "a ShardingPlan")
    for name in ("shape", "world_size", "tp"):
        _require(f"both plans have the same {name}", name, getattr(one, name), getattr(other, name))


def check_same_cache(one: ShardingPlan, other: ShardingPlan) -> None:
    """Return when every rank holds the same KV heads, and of the same sequences the same positions in the same slots.

    Positions are those that both plans hold: below both max_seq_len, where they are given.

    Raises:
        PlanError: names the first rule that does not hold, and both plans' values.
    """
    check_same_model(one, other)
    _require("both plans have the same kvdp, which divides the batch", "kvdp", one.kvdp, other.kvdp)
    _require(
        "both plans share a sequence by as many ranks, kvp or cp",
        "kvp*cp",
        one.sequence_ranks,
        other.sequence_ranks,
    )
    if one.group_size > 1 and one.kv_groups > 1:
        # Else both orders put every rank in the same place.
        _require("both plans have the same rank_order", "rank_order", one.rank_order, other.rank_order)
    _require("both plans have the same block_size", "block_size", one.block_size, other.block_size)
    position = _first_difference(one, other)
    if position is not None:
        places = " and ".join(
            f"{plan.kv_layout} puts position {position} in slot {plan.layout.slot(position)} of rank "
            f"{plan.layout.owner(position)}"
            for plan in (one, other)
        )
        raise PlanError("both plans' kv_layout gives every position the same owner and slot", places)


def _first_difference(one: ShardingPlan, other: ShardingPlan) -> int | None:
    """The first position that both hold and that differs in owner or slot, given equal ranks and block sizes."""
    runs = [_run(plan.layout) for plan in (one, other)]
    if one.sequence_ranks == 1 or runs[0] == runs[1]:
        return None
    # Both begin with a run on rank 0; where the shorter one ends, the owners differ.
    position = min(runs)
    lengths = [plan.max_seq_len for plan in (one, other) if plan.max_seq_len is not None]
    return None if lengths and min(lengths) <= position else position


def _run(layout: BoundLayout) -> int:
    """Consecutive positions that a rank holds. Equal runs are equal layouts: a Contiguous one ends after one round."""
    return layout.local_length if isinstance(layout, ContiguousShards) else layout.interleave


def _require(rule: str, name: str, one: object, other: object) -> None:
    if one != other:
        raise PlanError(rule, f"{name}={one} and {name}={other}")
