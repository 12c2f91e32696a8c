"""Speed and memory of KV-parallel prefill against one process, and against what a user could do otherwise.

    python benchmarks/kvp_prefill.py            # the case that docs/performance.md quotes, on 2 and on 4 ranks
    python benchmarks/kvp_prefill.py --quick    # a short look at a short sequence

bfloat16, causal, round-robin, block 128, head_dim 128, 8 query heads and 1 KV head in all, drawn from a fixed seed. The
baseline is one process that calls scaled_dot_product_attention on 2 threads; ranks have 1 thread each. Contenders:

    kv-parallel    attention_kv_parallel_segmented_cte, as a user calls it
    gather K/V     all-gather K and V, put them in order, attend to all of them with this rank's heads
    ring packages  where they are installed; each rank has a contiguous part of the sequence and all heads
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Actions, Comparison, Ranks, peak_memory, seconds_of, time_rounds
from torch import Tensor

from nki_parallel_attn import AttentionShape, ShardingPlan, attention_kv_parallel_segmented_cte
from nki_parallel_attn.kernels import attention_kv_parallel_segmented_cte_torch as twin
from nki_parallel_attn.kernels.collectives_torch import exchange_for
from nki_parallel_attn.ops import attention_kv_parallel_segmented_cte as operation

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 1, 128, 128
DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5
# Two roundings to bfloat16, of a part and of the merge, of outputs that stay below 4.
TOLERANCE = 4 * 2 * 2**-9
TIME_BARS = {2: 1.20, 4: 1.40}
MEMORY_BAR = 1.3


def global_inputs(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [HEADS, S, D], k and v [KV_HEADS, S, D], the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, seq_len, HEAD_DIM), (KV_HEADS, seq_len, HEAD_DIM), (KV_HEADS, seq_len, HEAD_DIM)]
    q, k, v = (torch.randn(shape, generator=generator).to(DTYPE) for shape in shapes)
    return q, k, v


def one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]


def make_plan(ranks: int) -> ShardingPlan:
    shape = AttentionShape(q_heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    return ShardingPlan(shape, world_size=ranks, kvp=ranks, block_size=BLOCK_SIZE)


def set_up_kv_parallel(seq_len: int) -> Actions:
    plan = make_plan(dist.get_world_size())
    view = plan.rank(dist.get_rank())

    def prepare(length: int) -> Callable[[], Tensor]:
        q, k, v = global_inputs(length)
        q, k_cache, v_cache = view.shard_q(q).clone(), view.shard_kv(k), view.shard_kv(v)
        table, arguments = view.block_table(length), view.kvp_arguments(q_pos=0)
        return lambda: attention_kv_parallel_segmented_cte(q, k_cache, v_cache, table, scale=SCALE, **arguments)

    prefill = prepare(seq_len)
    small = prepare(plan.seg_size)
    return {
        "run": prefill,
        "output": lambda: prefill().float().numpy(),
        "stages": lambda: stage_seconds(prefill),
        "warm up": lambda: bool(small().numel()),
        "memory": lambda: peak_memory(prefill),
    }


def stage_seconds(call: Callable[[], object]) -> dict[str, float]:
    """Where one call's time goes on this rank; what the collectives wait for slower ranks is in them."""
    exchange = exchange_for()
    with exchange.round() as opened:
        round_type = type(opened)
    stages = [
        ("agree on arguments", operation, "agree"),
        ("gather Q", round_type, "all_gather"),
        ("read local K/V", twin, "read_local_kv"),
        ("attend", twin, "local_partials"),
        ("exchange partials", round_type, "all_to_all"),
        ("merge", twin, "merge"),
    ]
    seconds: defaultdict[str, float] = defaultdict(float)
    running: list[str] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()
                if not running:  # a stage inside another is part of it
                    seconds[name] += time.perf_counter() - start

        return run

    with ExitStack() as patches:
        for name, owner, attribute in stages:
            patches.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        total = seconds_of(call)
    return {**{name: seconds[name] for name, _, _ in stages}, "other": total - sum(seconds.values()), "total": total}


def set_up_gather_kv(seq_len: int) -> Actions:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    view = make_plan(ranks).rank(rank)

    def prepare(length: int) -> Callable[[], Tensor]:
        q, k, v = global_inputs(length)
        q, k_cache, v_cache = view.shard_q(q).clone(), view.shard_kv(k), view.shard_kv(v)

        def attend() -> Tensor:
            # Gathered along dim 1: [blocks, ranks, kv_heads, block_size, D] is the sequence in order.
            whole = [
                exchange_for()
                .all_gather(cache, dim=1)
                .permute(2, 0, 1, 3, 4)
                .reshape(KV_HEADS, -1, HEAD_DIM)[:, :length]
                for cache in (k_cache, v_cache)
            ]
            return one_process(q, *whole)

        return attend

    attend, small = prepare(seq_len), prepare(ranks * BLOCK_SIZE)
    return {
        "run": attend,
        "output": lambda: attend().float().numpy(),
        "warm up": lambda: bool(small().numel()),
        "memory": lambda: peak_memory(attend),
    }


def set_up_ring_attention_pytorch(seq_len: int) -> Actions:
    package = importlib.import_module("ring_attention_pytorch.ring_flash_attention")

    def run() -> Any:
        return package.ring_flash_attn(q, k, v, causal=True, bucket_size=512, ring_reduce_col=True)

    q, k, v = (_sequence_shard(t) for t in global_inputs(seq_len))
    return {"run": run, "output": lambda: run()[0].transpose(0, 1).float().numpy()}


def set_up_yunchang(seq_len: int) -> Actions:
    package = importlib.import_module("yunchang.ring")
    # As published it calls the CUDA op.
    attention: Any = importlib.import_module("yunchang.kernels.attention")
    attention._scaled_dot_product_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def run() -> Any:
        with torch.no_grad():
            return package.ring_pytorch_attn_func(q, k, v, causal=True)

    q, k, v = (_sequence_shard(t) for t in global_inputs(seq_len))
    return {"run": run, "output": lambda: run()[0].transpose(0, 1).float().numpy()}


RING_PACKAGES = {"ring_attention_pytorch": set_up_ring_attention_pytorch, "yunchang": set_up_yunchang}


def _sequence_shard(t: Tensor) -> Tensor:
    """[1, S / ranks, heads, D] of [heads, S, D]."""
    return t.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].transpose(0, 1)[None].contiguous()


def memory_yardstick(ranks: int, seq_len: int) -> int:
    """Bytes of a rank's output, the gathered Q, and the partial outputs that it sends and receives."""
    own = HEADS // ranks * seq_len * HEAD_DIM * DTYPE.itemsize
    return own * (1 + ranks + 2 * (ranks - 1))


def check_output(ranks: Ranks, expected: Tensor, dim: int = 0) -> float:
    """Largest deviation from the baseline; an error if it is more than rounding."""
    outputs = torch.cat([torch.from_numpy(part) for part in ranks.run("output")], dim=dim)
    deviation = float((outputs - expected.float()).abs().max())
    if not deviation <= TOLERANCE:
        raise AssertionError(f"output deviates from the baseline's by {deviation}, more than {TOLERANCE}")
    return deviation


def measure_memory(setup: Callable[[int], Actions], ranks: int, seq_len: int) -> list[int]:
    """Each rank's peak, in fresh processes that have only run a short sequence."""
    with Ranks(ranks, setup, seq_len) as fresh:
        fresh.run("warm up")
        return fresh.run("memory")


def median_stages(ranks: Ranks, repeats: int) -> dict[str, float]:
    """Of each stage, the median over ranks and repeats."""
    samples = [sample for _ in range(repeats) for sample in ranks.run("stages")]
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def compare(ranks: int, seq_len: int, rounds: int) -> None:
    q, k, v = global_inputs(seq_len)
    expected = one_process(q, k, v)
    with Ranks(ranks, set_up_kv_parallel, seq_len) as ours, Ranks(ranks, set_up_gather_kv, seq_len) as gather:
        deviation = check_output(ours, expected)
        check_output(gather, expected)
        seconds = time_rounds(
            {
                "one process": lambda: seconds_of(lambda: one_process(q, k, v)),
                "kv-parallel": lambda: ours.seconds("run"),
                "gather K/V": lambda: gather.seconds("run"),
            },
            rounds,
        )
        stages = median_stages(ours, 5)
    yardstick = memory_yardstick(ranks, seq_len)
    print(f"\n{ranks} ranks, S = {seq_len}, {rounds} rounds; largest deviation from one process {deviation:.1e}")
    print(f"{'':24}{'median ms':>12}{'min ms':>10}{'median ratio':>15}{'ratio of minima':>17}{'peak MiB/rank':>15}")
    print(f"{'one process':24}{_milliseconds(seconds['one process'])}")
    for name, setup in (("kv-parallel", set_up_kv_parallel), ("gather K/V", set_up_gather_kv)):
        compared = Comparison(seconds["one process"], seconds[name])
        peak = max(measure_memory(setup, ranks, seq_len))
        print(
            f"{name:24}{_milliseconds(seconds[name])}{compared.median_ratio:15.3f}{compared.ratio_of_minima:17.3f}"
            f"{peak / 2**20:15.1f}"
        )
        if name == "kv-parallel":
            time_bar, memory_bar = TIME_BARS.get(ranks), f"{peak / yardstick:.2f} of {yardstick / 2**20:.1f} MiB"
            verdict = f"memory {memory_bar} (bar {MEMORY_BAR})"
            if time_bar:
                verdict = f"time {compared.median_ratio:.3f} (bar {time_bar}), " + verdict
    print(f"kv-parallel: {verdict}")
    print("stages, median ms over ranks: " + ", ".join(f"{name} {value * 1e3:.2f}" for name, value in stages.items()))


def compare_ring_packages(ranks: int, seq_len: int, rounds: int) -> None:
    q, k, v = global_inputs(seq_len)
    expected = one_process(q, k, v)
    for package, setup in RING_PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package:24}not installed")
            continue
        with Ranks(ranks, setup, seq_len) as ring:
            check_output(ring, expected, dim=1)
            seconds = time_rounds(
                {
                    "one process": lambda: seconds_of(lambda: one_process(q, k, v)),
                    package: partial(ring.seconds, "run"),
                },
                rounds,
            )
        compared = Comparison(seconds["one process"], seconds[package])
        ratios = f"{compared.median_ratio:15.3f}{compared.ratio_of_minima:17.3f}"
        print(f"{package:24}{_milliseconds(seconds[package])}{ratios}   ({ranks} ranks, {rounds} rounds)")


def _milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:12.1f}{min(seconds) * 1e3:10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="S = 2048, 5 rounds")
    parser.add_argument(
        "--ring", type=int, metavar="ROUNDS", default=0, help="also time ring packages, slow ones among them"
    )
    options = parser.parse_args()
    if options.quick:
        options.seq_len, options.rounds = 2048, 5
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {DTYPE}")
    for ranks in options.ranks:
        compare(ranks, options.seq_len, options.rounds)
    if options.ring:
        for ranks in options.ranks:
            compare_ring_packages(ranks, options.seq_len, options.ring)


if __name__ == "__main__":
    main()
