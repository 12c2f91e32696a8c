"""Prefill a decoder with its KV cache dealt over the ranks, and compare with the unsharded model.

    torchrun --nproc-per-node 4 launch/kvp_prefill.py
    torchrun --nproc-per-node 4 launch/kvp_prefill.py --help

The model comes from prefill_model.py, the options from prefill_options.py, the report from prefill_report.py;
rank_process.py joins the ranks and prints an error once. docs/launch.md explains the output.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console

from launcher import cache_block_size, show_progress, verify_tokens
from nki_parallel_attn.errors import PlanError
from nki_parallel_attn.integrations.kv_parallel_prefill import KVParallelPrefill
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.topology.kv_layout import Contiguous, RoundRobin
from prefill_model import PrefillModel, load_model
from prefill_options import make_parser, parse
from prefill_report import Call, PrefillReport, RankFigures, compare, least_bytes
from rank_process import Job, run_as_rank


def main(job: Job) -> int:
    """Exit status: 0 when the logits agree, 1 when they do not."""
    options = parse(sys.argv[1:])
    console = Console(quiet=job.rank > 0, highlight=False, width=None if sys.stdout.isatty() else 120)
    if options.help:
        console.print(make_parser().format_help(), markup=False)
        return 0
    start = time.perf_counter()
    model = load_model(options)
    load_seconds = time.perf_counter() - start
    plan = make_plan(model, options, job.world_size)
    plan.verify()
    verify_tokens([model.token_ids])
    _introduce(console, job, model, plan)

    prefill = KVParallelPrefill(model.decoder, plan, job.rank, groups=plan.process_groups(), backend=options.backend)
    calls = split_calls(len(model.token_ids), plan, options.apc)
    hidden = run(prefill, model, calls, console)
    figures: list[RankFigures | None] = [None] * job.world_size
    dist.all_gather_object(figures, RankFigures(prefill.cache_bytes, prefill.measured))
    passed = [False]
    if job.rank == 0:
        report = _report(prefill, model, calls, hidden, [f for f in figures if f is not None], load_seconds)
        report.show(console)
        if options.report:
            report.write(options.report)
        passed[0] = report.comparison.passed
    dist.broadcast_object_list(passed)
    return 0 if passed[0] else 1


def make_plan(model: PrefillModel, options: argparse.Namespace, world_size: int) -> ShardingPlan:
    """One model copy, all ranks in one KV group.

    Raises:
        ArgumentError: a block size beyond the text.
        PlanError: a world size that does not divide the query heads, or sizes that do not fit each other.
    """
    shape, length = model.decoder.config.attention_shape(), len(model.token_ids)
    if shape.q_heads % world_size:
        sizes: list[int | str] = [size for size in range(1, shape.q_heads + 1) if shape.q_heads % size == 0]
        rule = "the number of ranks divides the query heads"
        raise PlanError(rule, f"{world_size} ranks, {shape.q_heads} query heads", {"world_size": sizes})
    block_size = cache_block_size(options.block_size, length, world_size)
    return ShardingPlan(
        shape,
        world_size=world_size,
        kvp=world_size,
        kv_layout=Contiguous() if options.layout == "contiguous" else RoundRobin(),
        block_size=block_size,
        # Queries are padded to whole segments: no more than needed for a short text.
        seg_size=options.seg_size or min(world_size * block_size, -(-length // block_size) * block_size),
        max_seq_len=length,
    )


def split_calls(length: int, plan: ShardingPlan, apc: bool) -> list[Call]:
    """The whole text in one call; with `apc` in two, the first about half of it, in whole segments if there are."""
    if not apc or length < 2:
        return [Call(0, length)]
    unit = next(unit for unit in (plan.seg_size, plan.block_size, 1) if unit <= length // 2)
    first = length // 2 // unit * unit
    return [Call(0, first), Call(first, length, apc_mode=True)]


def run(prefill: KVParallelPrefill, model: PrefillModel, calls: list[Call], console: Console) -> torch.Tensor:
    """Hidden states [S, hidden] of all calls."""
    layers = model.decoder.config.layers
    parts = []
    with show_progress(console) as progress:
        bar = progress.add_task("KV-parallel prefill", total=layers * len(calls), unit="layers")
        for call in calls:
            tokens = model.token_ids[call.start : call.stop]
            parts.append(prefill.extend(tokens, apc_mode=call.apc_mode, after_layer=lambda: progress.advance(bar)))
    return torch.cat(parts)


def _report(
    prefill: KVParallelPrefill,
    model: PrefillModel,
    calls: list[Call],
    hidden: torch.Tensor,
    figures: list[RankFigures],
    load_seconds: float,
) -> PrefillReport:
    with torch.no_grad():
        start = time.perf_counter()
        logits = model.decoder.logits(hidden)
        logits_seconds = time.perf_counter() - start
        start = time.perf_counter()
        reference = model.reference(model.token_ids)
        reference_seconds = time.perf_counter() - start
    return PrefillReport(
        model=model.name,
        plan=prefill.plan,
        calls=calls,
        backend=prefill.backend,
        transport=prefill.tp_exchange.transport,
        ranks=figures,
        least=least_bytes(prefill.plan, model.decoder.config, calls),
        other_seconds={
            "load weights": load_seconds,
            "final norm and logits": logits_seconds,
            model.reference_name: reference_seconds,
        },
        comparison=compare(model, logits, reference),
    )


def _introduce(console: Console, job: Job, model: PrefillModel, plan: ShardingPlan) -> None:
    console.print(f"{model.name} reads {len(model.token_ids)} tokens", markup=False)
    if not job.under_torchrun:
        console.print("One rank. For more: torchrun --nproc-per-node 4 launch/kvp_prefill.py", markup=False)
    console.print(plan.table(dtype=torch.float32), markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_as_rank(main, "kvp_prefill")
