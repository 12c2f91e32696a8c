"""Speed and memory of KV-parallel prefill against one process, and against what a user could do otherwise.

    python benchmarks/kvp_prefill.py            # the case that docs/performance.md quotes, on 2 and on 4 ranks
    python benchmarks/kvp_prefill.py --quick    # a short look at a short sequence

bfloat16, causal, round-robin, block 128, head_dim 128, 8 query heads and 1 KV head in all, drawn from a fixed seed. The
baseline is one process that calls scaled_dot_product_attention on 2 threads; ranks have 1 thread each, a rank alone 2.
Contenders:

    kv-parallel    attention_kv_parallel_segmented_cte, as a user calls it
    gather K/V     all-gather K and V, put them in order, attend to all of them with this rank's heads
    ring packages  where they are installed; each rank has a contiguous part of the sequence and all heads
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Actions, Comparison, Ranks, machine, peak_memory, seconds_of, stage_seconds, time_rounds
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
THREADS = 2
BASELINE, OURS = "one process", "kv-parallel"
QUOTED_SEQ_LEN = 8192  # the bars are for this length
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
        "stages": lambda: stage_seconds(prefill, stages()),
        "warm up": lambda: bool(small().numel()),
        "memory": lambda: peak_memory(prefill),
    }


def stages() -> list[tuple[str, Any, str]]:
    """What one call goes through; what the collectives wait for slower ranks is in them."""
    exchange = exchange_for()
    with exchange.round() as opened:
        round_type = type(opened)
    return [
        ("agree on arguments", operation, "agree"),
        ("gather Q", round_type, "all_gather"),
        ("read local K/V", twin, "read_local_kv"),
        ("attend", twin, "local_partials"),
        ("exchange partials", round_type, "all_to_all"),
        ("merge", twin, "merge"),
    ]


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


CONTENDERS = {OURS: set_up_kv_parallel, "gather K/V": set_up_gather_kv}


def set_up_ring_attention_pytorch(seq_len: int) -> Actions:
    package = importlib.import_module("ring_attention_pytorch.ring_flash_attention")

    def run() -> Any:
        return package.ring_flash_attn(q, k, v, causal=True, bucket_size=512, ring_reduce_col=True)

    # It mixes dtypes unless its inputs are float32.
    q, k, v = (_sequence_shard(t).float() for t in global_inputs(seq_len))
    return {"run": run, "output": lambda: run()[0].transpose(0, 1).numpy()}


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


def start_ranks(ranks: int, setup: Callable[[int], Actions], seq_len: int) -> Ranks:
    return Ranks(ranks, setup, seq_len, threads=max(1, THREADS // ranks))


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
    with start_ranks(ranks, setup, seq_len) as fresh:
        fresh.run("warm up")
        return fresh.run("memory")


def median_stages(ranks: Ranks, repeats: int) -> dict[str, float]:
    """Of each stage, the median over ranks and repeats."""
    samples = [sample for _ in range(repeats) for sample in ranks.run("stages")]
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


@dataclass(frozen=True)
class Result:
    """One case: seconds of the baseline and of each contender by round, and what the contenders' ranks need."""

    ranks: int
    seq_len: int
    deviation: float
    seconds: dict[str, list[float]]
    peak_bytes: dict[str, int]
    stages: dict[str, float]

    def against_baseline(self, name: str) -> Comparison:
        return Comparison(self.seconds[BASELINE], self.seconds[name])

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes[OURS] / memory_yardstick(self.ranks, self.seq_len)


def measure(ranks: int, seq_len: int, rounds: int, contenders: Sequence[str]) -> Result:
    """Contenders are names of CONTENDERS, OURS among them."""
    q, k, v = global_inputs(seq_len)
    expected = one_process(q, k, v)
    with ExitStack() as stack:
        pools = {name: stack.enter_context(start_ranks(ranks, CONTENDERS[name], seq_len)) for name in contenders}
        deviation = max(check_output(pool, expected) for pool in pools.values())
        timed: dict[str, Callable[[], float]] = {BASELINE: lambda: seconds_of(lambda: one_process(q, k, v))}
        timed |= {name: partial(pool.seconds, "run") for name, pool in pools.items()}
        seconds = time_rounds(timed, rounds)
        stages = median_stages(pools[OURS], min(rounds, 5))
    peaks = {name: max(measure_memory(CONTENDERS[name], ranks, seq_len)) for name in contenders}
    return Result(ranks, seq_len, deviation, seconds, peaks, stages)


def report(result: Result) -> None:
    rounds = len(result.seconds[BASELINE])
    print(f"\n{result.ranks} ranks, S = {result.seq_len}, {rounds} rounds; outputs within {result.deviation:.1e}")
    print(f"{'':24}{'median ms':>12}{'min ms':>10}{'median ratio':>15}{'ratio of minima':>17}{'peak MiB/rank':>15}")
    for name, seconds in result.seconds.items():
        line = f"{name:24}{_milliseconds(seconds)}"
        if name != BASELINE:
            compared = result.against_baseline(name)
            line += (
                f"{compared.median_ratio:15.3f}{compared.ratio_of_minima:17.3f}{result.peak_bytes[name] / 2**20:15.1f}"
            )
        print(line)
    print("stages, median ms over ranks:")
    for name, value in result.stages.items():
        print(f"    {name:20}{value * 1e3:12.2f}")
    if result.seq_len == QUOTED_SEQ_LEN:
        yardstick = f"memory of {memory_yardstick(result.ranks, result.seq_len) / 2**20:.1f} MiB"
        _judge(yardstick, result.memory_ratio, MEMORY_BAR)
        if result.ranks in TIME_BARS:
            _judge("time of one process", result.against_baseline(OURS).median_ratio, TIME_BARS[result.ranks])


def _judge(what: str, ratio: float, bar: float) -> None:
    print(f"{what}: {ratio:.3f}, at most {bar:.2f}: {'holds' if ratio <= bar else 'BROKEN'}")


def compare_ring_packages(ranks: int, seq_len: int, rounds: int) -> None:
    q, k, v = global_inputs(seq_len)
    expected = one_process(q, k, v)
    for package, setup in RING_PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package:24}not installed")
            continue
        with start_ranks(ranks, setup, seq_len) as ring:
            check_output(ring, expected, dim=1)
            seconds = time_rounds(
                {
                    BASELINE: lambda: seconds_of(lambda: one_process(q, k, v)),
                    package: partial(ring.seconds, "run"),
                },
                rounds,
            )
        compared = Comparison(seconds[BASELINE], seconds[package])
        ratios = f"{compared.median_ratio:15.3f}{compared.ratio_of_minima:17.3f}"
        print(f"{package:24}{_milliseconds(seconds[package])}{ratios}   ({ranks} ranks, {rounds} rounds)")


def _milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:12.1f}{min(seconds) * 1e3:10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=QUOTED_SEQ_LEN)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="S = 2048, 5 rounds")
    parser.add_argument(
        "--ring", type=int, metavar="ROUNDS", default=0, help="also time ring packages, slow ones among them"
    )
    options = parser.parse_args()
    if options.quick:
        options.seq_len, options.rounds = 2048, 5
    torch.set_num_threads(THREADS)
    print(machine())
    for ranks in options.ranks:
        report(measure(ranks, options.seq_len, options.rounds, list(CONTENDERS)))
    if options.ring:
        for ranks in options.ranks:
            compare_ring_packages(ranks, options.seq_len, options.ring)


if __name__ == "__main__":
    main()
