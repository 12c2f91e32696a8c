"""Prefill prompts KV-parallel, decode greedily over the sharded cache, and compare with the unsharded model's tokens.

    torchrun --nproc-per-node 4 launch/decode.py
    torchrun --nproc-per-node 4 launch/decode.py --strategy kvdp --batch 8
    torchrun --nproc-per-node 4 launch/decode.py --help

The model comes from decode_model.py, the options from decode_options.py, the report from decode_report.py;
rank_process.py joins the ranks and prints an error once. docs/decode.md explains the output.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console

from decode_model import DecodeModel, DenseGreedy, load_model
from decode_options import make_parser, parse, sharing
from decode_report import DecodeReport, RankFigures, compare
from launcher import cache_block_size, show_progress, verify_tokens
from nki_parallel_attn.integrations.kv_caches import FP8
from nki_parallel_attn.integrations.kv_parallel_decode import KVParallelDecode, hand_over, prefill_batch
from nki_parallel_attn.integrations.kv_parallel_prefill import Measurements
from nki_parallel_attn.plan import ShardingPlan
from rank_process import Job, run_as_rank


@dataclass(frozen=True)
class Plans:
    """Two plans for one model copy on all ranks: the prompts' prefill, and the decoding that follows."""

    prefill: ShardingPlan
    decode: ShardingPlan


def main(job: Job) -> int:
    """Exit status: 0 when all tokens are equal, 1 when they are not."""
    options = parse(sys.argv[1:])
    console = Console(quiet=job.rank > 0, highlight=False, width=None if sys.stdout.isatty() else 120)
    if options.help:
        console.print(make_parser().format_help(), markup=False)
        return 0
    kvdp, cp = sharing(options.strategy, job.world_size)
    batch = options.batch or len(options.prompt or ()) or kvdp
    model = load_model(options, batch)
    plans = make_plans(model, options, kvdp, cp)
    plans.prefill.verify()
    plans.decode.verify()
    verify_tokens(model.prompts)
    _introduce(console, job, model, plans, options)

    figures, tokens = run(job, model, plans, options, console)
    gathered: list[RankFigures | None] = [None] * job.world_size
    dist.all_gather_object(gathered, figures)
    passed = [False]
    if job.rank == 0:
        report = _report(model, plans, options, [f for f in gathered if f is not None], tokens)
        report.show(console)
        if options.report:
            report.write(options.report)
        passed[0] = report.passed
    dist.broadcast_object_list(passed)
    return 0 if passed[0] else 1


def make_plans(model: DecodeModel, options: argparse.Namespace, kvdp: int, cp: int) -> Plans:
    """All ranks in one KV group, for prefill and for decoding.

    Raises:
        ArgumentError: a block size beyond the sequence.
        PlanError: a world size that the heads do not divide by, a batch that kvdp does not divide.
    """
    world_size, prompt = kvdp * cp, max(map(len, model.prompts))
    block_size = cache_block_size(options.block_size, prompt + options.steps, world_size)
    prefill = ShardingPlan(
        model.decoder.config.attention_shape(),
        world_size=world_size,
        kvp=world_size,
        block_size=block_size,
        seg_size=min(world_size * block_size, -(-prompt // block_size) * block_size),
        max_seq_len=prompt + options.steps,
    )
    decode = dataclasses.replace(prefill, kvp=1, kvdp=kvdp, cp=cp)
    decode.batch_per_rank(len(model.prompts))
    if options.strategy == "cp":
        decode.check_same_cache(prefill)
    return Plans(prefill, decode)


def run(
    job: Job, model: DecodeModel, plans: Plans, options: argparse.Namespace, console: Console
) -> tuple[RankFigures, list[list[int]]]:
    """What this rank measured, and the tokens of every sequence: one from the prefill, one from each step."""
    decoder, lengths = model.decoder, [len(prompt) for prompt in model.prompts]
    seconds: dict[str, float] = {}
    with show_progress(console) as progress:
        layers = decoder.config.layers * len(lengths)
        bar = progress.add_task("KV-parallel prefill", total=layers, unit="layers")
        start = time.perf_counter()
        caches, hidden = prefill_batch(
            decoder,
            plans.prefill,
            job.rank,
            model.prompts,
            groups=plans.prefill.process_groups(),
            backend=options.backend,
            kv_dtype=FP8 if options.kv_dtype == "fp8" else None,
            after_layer=lambda: progress.advance(bar),
        )
        seconds["KV-parallel prefill"] = time.perf_counter() - start
        moved = 0
        if options.strategy != "cp":
            bar = progress.add_task("redistribute the cache", total=1, unit="stage")
            start = time.perf_counter()
            caches, moved = hand_over(plans.prefill, plans.decode, caches, lengths)
            seconds["redistribute the cache"] = time.perf_counter() - start
            progress.advance(bar)
        groups = plans.decode.process_groups()
        decode = KVParallelDecode(
            decoder, plans.decode, job.rank, caches, lengths, groups=groups, backend=options.backend
        )
        token_ids = decode.greedy(hidden)
        columns, decode.measured = [token_ids], Measurements()
        bar = progress.add_task(f"decode, {options.strategy}", total=options.steps, unit="steps")
        start = time.perf_counter()
        for _ in range(options.steps):
            token_ids = decode.greedy(decode.step(token_ids))
            columns.append(token_ids)
            progress.advance(bar)
        seconds["decode"] = time.perf_counter() - start
    figures = RankFigures(
        cache_bytes=decode.cache_bytes,
        moved_bytes=moved,
        seconds=seconds,
        step_seconds=dict(decode.measured.seconds),
        sent=decode.measured.sent,
        transport=decode.tp_exchange.transport,
    )
    return figures, torch.stack(columns, 1).tolist()


def _report(
    model: DecodeModel,
    plans: Plans,
    options: argparse.Namespace,
    figures: list[RankFigures],
    tokens: list[list[int]],
) -> DecodeReport:
    fp8 = options.kv_dtype == "fp8"
    dense = DenseGreedy(model.decoder, fp8_kv=True)
    return DecodeReport(
        model=model.name,
        strategy=options.strategy,
        kv_dtype=FP8 if fp8 else model.decoder.embed_tokens.weight.dtype,
        prefill=plans.prefill,
        decode=plans.decode,
        config=model.decoder.config,
        lengths=[len(prompt) for prompt in model.prompts],
        steps=options.steps,
        ranks=figures,
        comparison=compare(model, tokens, dense if fp8 else model.greedy, dense.name if fp8 else model.greedy_name),
        unquantised=compare(model, tokens, model.greedy, model.greedy_name) if fp8 else None,
        text=model.decode(tokens[0]),
    )


def _introduce(console: Console, job: Job, model: DecodeModel, plans: Plans, options: argparse.Namespace) -> None:
    lengths = sorted({len(prompt) for prompt in model.prompts})
    between = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    console.print(
        f"{model.name} reads {len(model.prompts)} x {between} tokens and decodes {options.steps} steps", markup=False
    )
    if not job.under_torchrun:
        console.print("One rank. For more: torchrun --nproc-per-node 4 launch/decode.py", markup=False)
    dtype = FP8 if options.kv_dtype == "fp8" else model.decoder.embed_tokens.weight.dtype
    table = plans.decode.table(batch=len(model.prompts), dtype=dtype)
    console.print(table, markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_as_rank(main, "decode")
