"""Time, planning and memory of a decoding step over a context-parallel cache, against the best of one process.

    python benchmarks/decode.py            # the case that docs/decode_performance.md quotes
    python benchmarks/decode.py --quick    # a short look at a short context

bfloat16, 8 sequences of 32768 tokens, the last of them active, 1 KV head of 128; 2 ranks with 8 query heads and 1
thread each against one process with all 16 heads, the whole cache and 2 threads. In every round:

    one process    attention alone, its queries given and the new token already cached: one call of torch's fused CPU
                   op, the query heads of a sequence folded into rows. The plain call is timed once beside it.
    CP             all that a user does at every step: the plan's tensors, then attention_block_tkg with its checks and
                   comparison of arguments between ranks, Q, K and V projected from X (128 channels, the fewest that
                   there can be), attention, exchange of the partials, cache update. No output projection.

Over a flat cache, and over a block cache whose blocks lie in random order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import (
    Actions,
    Comparison,
    Ranks,
    machine,
    peak_allocated,
    peak_memory,
    seconds_of,
    stage_seconds,
    time_rounds,
)
from torch import Tensor

from nki_parallel_attn import AttentionShape, QuantizationType, ShardingPlan, attention_block_tkg
from nki_parallel_attn.kernels import attention_block_tkg_torch as twin
from nki_parallel_attn.kernels import decode_cache_torch, decode_collectives_torch
from nki_parallel_attn.ops import attention_block_tkg as operation

BATCH, RANKS, THREADS = 8, 2, 2
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8 * RANKS, 1, 128, 128
HIDDEN = 128
DTYPE = torch.bfloat16
# Two roundings to bfloat16, of a part and of the merge, of averages of many values that stay below 1/2.
TOLERANCE = 0.5 * 2 * 2**-9
BASELINE, FLAT, BLOCKS = "one process", "CP, flat cache", "CP, block cache"
QUOTED_CONTEXT = 32768  # the bars are for this length
TIME_BAR, PLANNING_BAR = 1.3, 0.05


@dataclass(frozen=True)
class Step:
    """One step of the unsharded model, the same in every process.

    Attributes:
        x: [BATCH, 1, HIDDEN], the active tokens.
        w_q, w_k, w_v: [HIDDEN, HEADS*HEAD_DIM], [HIDDEN, HEAD_DIM] twice.
        k, v: [BATCH, KV_HEADS, context, HEAD_DIM], the caches; the last slot is the active token's.
    """

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def draw(cls, context: int) -> Step:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(DTYPE)

        weights = [normal(HIDDEN, heads * HEAD_DIM, scale=HIDDEN**-0.5) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        caches = [normal(BATCH, KV_HEADS, context, HEAD_DIM) for _ in range(2)]
        return cls(normal(BATCH, 1, HIDDEN), *weights, *caches)

    @property
    def context(self) -> int:
        return self.k.shape[2]

    def project(self, weight: Tensor) -> Tensor:
        """[BATCH, heads, 1, HEAD_DIM] of the active tokens, rounded once."""
        return (self.x.float() @ weight.float()).to(DTYPE).view(BATCH, -1, 1, HEAD_DIM)


class OneProcess:
    """The whole cache, all heads, THREADS threads."""

    def __init__(self, context: int) -> None:
        step = Step.draw(context)
        self.q, self.k, self.v = step.project(step.w_q), step.k, step.v
        self.k[:, :, -1:], self.v[:, :, -1:] = step.project(step.w_k), step.project(step.w_v)
        self.rows = self.q.view(BATCH, KV_HEADS, -1, HEAD_DIM)

    def fused(self) -> Tensor:
        """[BATCH, KV_HEADS, HEADS, HEAD_DIM]."""
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(self.rows, self.k, self.v)[0]
        return out

    def plain(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True)


class ContextParallelRank:
    """What one rank of a CP group of all ranks does at every step, over a flat or a block cache."""

    def __init__(self, context: int, blocks: bool) -> None:
        shape, ranks = AttentionShape(q_heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM), dist.get_world_size()
        plan = ShardingPlan(shape, world_size=ranks, cp=ranks, block_size=BLOCK_SIZE, max_seq_len=context)
        self.view, whole = plan.rank(dist.get_rank()), Step.draw(context)
        heads = slice(self.view.q_heads.start * HEAD_DIM, self.view.q_heads.stop * HEAD_DIM)
        self.x, self.w_qkv = whole.x, torch.cat([whole.w_q[:, heads], whole.w_k, whole.w_v], 1)
        self.caches = [self.view.shard_kv(cache, paged=blocks) for cache in (whole.k, whole.v)]
        self.positions = torch.full((BATCH, 1), context - 1)
        self.sequences: list[list[int]] = []
        if blocks:
            places = torch.randperm(len(self.caches[0]), generator=torch.Generator().manual_seed(1))
            self.caches = [cache[places.argsort()] for cache in self.caches]
            self.sequences = places.view(BATCH, -1).tolist()

    def __call__(self) -> Tensor:
        """Attention of this rank's heads, [BATCH, q_heads, HEAD_DIM, 1]."""
        out, _, _ = attention_block_tkg(**self.inputs(), **self.planned(), **NOT_USED)
        assert isinstance(out, Tensor)
        return out

    def inputs(self) -> dict[str, Any]:
        return {"X": self.x, "W_qkv": self.w_qkv, "K_cache": self.caches[0], "V_cache": self.caches[1]}

    def planned(self) -> dict[str, Any]:
        """All that the plan makes for a step, the block table included."""
        view, positions, table = self.view, self.positions, None
        if self.sequences:
            table = view.active_blocks_table(self.sequences, len(self.sequences[0]), len(self.caches[0]))
        return {
            "pos_ids": view.pos_ids(positions),
            "attention_mask": view.attention_mask(positions),
            "kv_cache_update_idx": view.kv_cache_update_idx(positions, table),
            "active_blocks_table": table,
            "S_ctx": None if self.sequences else view.S_ctx(positions),
            **view.decode_arguments(),
        }


# The page's parameters have no defaults.
OFF = "rmsnorm_X_enabled rmsnorm_QK_pre_rope_enabled rmsnorm_QK_post_rope_enabled rope_contiguous_layout "
OFF += "K_cache_transposed transposed_out out_in_sb"
ABSENT = "X_hidden_dim_actual rmsnorm_X_eps rmsnorm_X_gamma bias_qkv weight_dequant_scale_qkv input_dequant_scale_qkv "
ABSENT += "rmsnorm_QK_pre_rope_W_Q rmsnorm_QK_pre_rope_W_K cos sin rmsnorm_QK_post_rope_W_Q rmsnorm_QK_post_rope_W_K "
ABSENT += "sink W_out bias_out weight_dequant_scale_out input_dequant_scale_out"
NOT_USED: dict[str, Any] = {
    **dict.fromkeys(ABSENT.split()),
    **dict.fromkeys(OFF.split(), False),
    "rmsnorm_QK_pre_rope_eps": 0.0,
    "rmsnorm_QK_post_rope_eps": 0.0,
    "quantization_type_qkv": QuantizationType.NONE,
    "quantization_type_out": QuantizationType.NONE,
    "update_cache": True,
}
PLANNING = "the plan's tensors"
STAGES = [
    (PLANNING, ContextParallelRank, "planned"),
    ("check arguments", operation, "check_arguments"),
    ("agree on arguments", operation, "agree"),
    ("project Q, K, V", twin, "new_tokens"),
    ("gather Q", decode_collectives_torch, "gather_heads"),
    ("attend", twin, "attend"),
    ("combine partials", decode_collectives_torch, "combine"),
    ("update cache", decode_cache_torch, "write_flat"),
    ("update cache", decode_cache_torch, "write_blocks"),
]


def set_up(context: int, blocks: bool) -> Actions:
    step = ContextParallelRank(context, blocks)
    return {
        "run": step,
        "output": lambda: step().float().numpy(),
        "stages": lambda: stage_seconds(step, STAGES),
        "tensors": lambda: peak_allocated(step),
        "resident": lambda: peak_memory(step),
    }


def start_ranks(context: int, blocks: bool) -> Ranks:
    return Ranks(RANKS, set_up, context, blocks, threads=THREADS // RANKS)


def check_output(ranks: Ranks, expected: Tensor) -> float:
    """Largest deviation from one process's output; an error if it is more than rounding."""
    heads = torch.cat([torch.from_numpy(part) for part in ranks.run("output")], dim=1)
    deviation = float((heads.view(BATCH, KV_HEADS, HEADS, HEAD_DIM) - expected.float()).abs().max())
    if not deviation <= TOLERANCE:
        raise AssertionError(f"output deviates from one process's by {deviation}, more than {TOLERANCE}")
    return deviation


def measure(context: int, rounds: int) -> bool:
    """Print one case; whether it holds the bars."""
    one = OneProcess(context)
    plain = seconds_of(one.plain)
    with ExitStack() as stack:
        pools = {name: stack.enter_context(start_ranks(context, name == BLOCKS)) for name in (FLAT, BLOCKS)}
        deviation = max(check_output(pool, one.fused()) for pool in pools.values())
        timed: dict[str, Callable[[], float]] = {BASELINE: lambda: seconds_of(one.fused)}
        timed |= {name: partial(pool.seconds, "run") for name, pool in pools.items()}
        seconds = time_rounds(timed, rounds)
        stages = {name: median_stages(pool.run("stages") for _ in range(rounds)) for name, pool in pools.items()}
        memory = {name: memory_of(pool) for name, pool in pools.items()}
    print(f"\ncontext {context}, {rounds} rounds; outputs within {deviation:.1e}")
    print(f"{'':24}{'median ms':>12}{'min ms':>10}{'median ratio':>15}{'ratio of minima':>17}")
    for name, values in seconds.items():
        compared = Comparison(seconds[BASELINE], values)
        times = f"{statistics.median(values) * 1e3:12.1f}{min(values) * 1e3:10.1f}"
        print(f"{name:24}{times}{compared.median_ratio:15.3f}{compared.ratio_of_minima:17.3f}")
    print(f"the plain call in one process, once: {plain * 1e3:.0f} ms")
    print(f"{'stages, median ms':24}" + "".join(f"{name:>18}" for name in stages))
    for stage in stages[FLAT]:
        print(f"    {stage:20}" + "".join(f"{by_stage[stage] * 1e3:18.2f}" for by_stage in stages.values()))
    print("memory of one step, KiB: tensors at once, growth of the resident set")
    for name, (tensors, resident) in memory.items():
        with start_ranks(context // 2, name == BLOCKS) as half:
            half_tensors, half_resident = memory_of(half)
        half_text = f"at context {context // 2} {half_tensors / 1024:.0f} and {half_resident / 1024:.0f}"
        print(f"    {name:20}{tensors / 1024:.0f} and {resident / 1024:.0f}; {half_text}")
    if context != QUOTED_CONTEXT:
        return True
    ratio = Comparison(seconds[BASELINE], seconds[FLAT]).median_ratio
    planning = max(by_stage[PLANNING] / by_stage["total"] for by_stage in stages.values())
    in_time = _judge("time of one process, flat cache", ratio, TIME_BAR)
    return _judge("planning, of the step", planning, PLANNING_BAR) and in_time


def memory_of(ranks: Ranks) -> tuple[int, int]:
    """Bytes of one step after a first one, of the largest rank: tensors held at once, growth of its resident memory."""
    ranks.run("output")
    return max(ranks.run("tensors")), max(ranks.run("resident"))


def median_stages(runs: Iterable[list[dict[str, float]]]) -> dict[str, float]:
    """Of each stage, the median over ranks and runs."""
    samples = [sample for run in runs for sample in run]
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def _judge(what: str, ratio: float, bar: float) -> bool:
    print(f"{what}: {ratio:.3f}, at most {bar:.2f}: {'holds' if ratio <= bar else 'BROKEN'}")
    return ratio <= bar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=QUOTED_CONTEXT)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="context 4096, 5 rounds")
    options = parser.parse_args()
    if options.quick:
        options.context, options.rounds = 4096, 5
    torch.set_num_threads(THREADS)
    print(machine())
    if not measure(options.context, options.rounds):
        sys.exit(1)


if __name__ == "__main__":
    main()
