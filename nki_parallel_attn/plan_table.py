"""A plan as text: a head, its replica groups, and one row per rank; worlds of thousands of ranks stay readable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from nki_parallel_attn.topology.kv_layout import Contiguous

if TYPE_CHECKING:
    from nki_parallel_attn.plan import ShardingPlan
    from nki_parallel_attn.plan_rank import RankView
    from nki_parallel_attn.sim.replica_group import ReplicaGroup

MOST_ROWS = 32
"""Ranks shown one by one; of more, the first and last few are."""
ENDS = (12, 4)
MOST_LISTS = 4
MOST_ITEMS = 8


def table(plan: ShardingPlan, length: int | None, batch: int | None, dtype: torch.dtype) -> str:
    """`plan` as aligned text; tokens, blocks and bytes where a length is given or the plan has max_seq_len."""
    batch = plan.kvdp if batch is None else batch
    sized = length is not None or plan.max_seq_len is not None
    lines = [*_head(plan), *(_sizes(plan, length, batch, dtype) if sized else []), *_groups(plan), ""]
    rows = [_columns(plan, sized)]
    shown = _shown_ranks(plan.world_size)
    for rank in shown:
        rows.append(_row(plan.rank(rank), length, batch, dtype, sized))
    text = align(rows)
    skipped = plan.world_size - len(shown)
    if skipped:
        text.insert(1 + ENDS[0], f"... {skipped} more ranks, rank {ENDS[0]} to {plan.world_size - ENDS[1] - 1}")
    return "\n".join(lines + text)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def human_bytes(count: int) -> str:
    """Bytes with a binary unit: 512 B, 1.5 KiB, 24.0 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _head(plan: ShardingPlan) -> list[str]:
    shape = plan.shape
    sharing = "no rank shares KV"
    if plan.kvp > 1:
        sharing = f"kvp={plan.kvp} share KV for prefill, {plan.kv_layout}"
    elif plan.group_size > 1:
        sharing = f"kvdp={plan.kvdp} x cp={plan.cp} share KV for decoding" + (
            f", {plan.kv_layout}" if plan.cp > 1 else ""
        )
    copies = "copy" if plan.replicas == 1 else "copies"
    return [
        f"ShardingPlan: {shape.q_heads} Q heads, {shape.kv_heads} KV heads of {shape.head_dim}, {shape.layers} layers",
        f"  ranks      {plan.world_size} = {plan.replicas} model {copies} x tp {plan.tp}; {sharing}; {plan.rank_order}",
        f"  per rank   {plan.q_heads_per_rank} Q heads, {plan.kv_heads_per_rank} KV heads; "
        f"block_size {plan.block_size}, seg_size {plan.seg_size}",
        f"  machine    {plan.target}, LNC {plan.lnc}: {_machines(plan)}",
    ]


def _machines(plan: ShardingPlan) -> str:
    ranks = plan.platform.ranks(plan.lnc)
    count = -(-plan.world_size // ranks)
    return f"{plan.world_size} of {count * ranks} ranks of {count} {plan.platform.name}"


def _sizes(plan: ShardingPlan, length: int | None, batch: int, dtype: torch.dtype) -> list[str]:
    memory = plan.memory(length, batch, dtype)
    return [
        f"  KV cache   {human_bytes(memory.per_rank)} per rank for {batch} x {plan.length(length)} tokens of {dtype}; "
        f"unsharded {human_bytes(memory.unsharded)}, tensor parallel {human_bytes(memory.tensor_parallel)}; "
        f"{100 * memory.per_rank / memory.hbm_per_rank:.2f}% of a rank's {human_bytes(memory.hbm_per_rank)}"
    ]


def _groups(plan: ShardingPlan) -> list[str]:
    kinds = ["kv", *(kind for kind in ("cp", "kvdp") if plan.cp > 1 and plan.kvdp > 1), "tp"]
    if plan.replicas > 1:
        kinds.append("replica")
    return [f"  {kind:<10} {_group_text(plan.replica_group(kind))}" for kind in kinds]


def _group_text(group: ReplicaGroup) -> str:
    lists = [run_text(ranks) for ranks in group.groups]
    if len(lists) > MOST_LISTS:
        lists = [*lists[: MOST_LISTS - 1], "...", lists[-1]]
    return f"{len(group.groups)} x {group.group_size} ranks: " + ", ".join(lists)


def run_text(numbers: Sequence[int]) -> str:
    """A list of numbers, by its pattern when it is long and even: [0..63], [0, 4, .. 252]."""
    if len(numbers) <= MOST_ITEMS:
        return str(list(numbers))
    step = numbers[1] - numbers[0]
    if all(b - a == step for a, b in pairwise(numbers)):
        return f"[{numbers[0]}..{numbers[-1]}]" if step == 1 else f"[{numbers[0]}, {numbers[1]}, .. {numbers[-1]}]"
    return f"[{', '.join(map(str, numbers[: MOST_ITEMS - 2]))}, .. {numbers[-1]}]"


def _columns(plan: ShardingPlan, sized: bool) -> list[str]:
    return [
        "rank",
        *_axes(plan),
        "Q heads",
        "KV heads",
        *(["tokens", "blocks", "KV cache"] if sized else ["positions"]),
        "KV group",
    ]


def _axes(plan: ShardingPlan) -> list[str]:
    """Axes worth a column."""
    return [name for name, size in plan.mesh.axes if size > 1]


def _row(view: RankView, length: int | None, batch: int, dtype: torch.dtype, sized: bool) -> list[str]:
    plan = view.plan
    cells = [str(view.rank), *(str(view.coordinates[name]) for name in _axes(plan))]
    cells += [_range_text(view.q_heads), _range_text(view.kv_heads)]
    if sized:
        cells += [str(view.tokens_held(length)), str(view.blocks_held(length))]
        cells.append(human_bytes(plan.memory(length, batch, dtype).per_rank))
    else:
        cells.append(_positions_text(view))
    return [*cells, run_text(view.group_ranks("kv"))]


def _positions_text(view: RankView) -> str:
    """The first positions a rank holds, where no length says how many."""
    plan = view.plan
    if plan.sequence_ranks == 1:
        return "all"
    if isinstance(plan.kv_layout, Contiguous):
        return f"share {view.sequence_index} of {plan.sequence_ranks}"
    layout = plan.layout
    run = getattr(plan.kv_layout, "interleave", plan.block_size)
    first = [int(layout.position(view.sequence_index, slot)) for slot in (0, run)]
    return f"{first[0]}..{first[0] + run - 1}, {first[1]}..{first[1] + run - 1}, .."


def _range_text(numbers: range) -> str:
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}..{numbers.stop - 1}"


def _shown_ranks(world_size: int) -> list[int]:
    if world_size <= MOST_ROWS:
        return list(range(world_size))
    return [*range(ENDS[0]), *range(world_size - ENDS[1], world_size)]
