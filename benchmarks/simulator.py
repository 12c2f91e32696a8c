"""Speed and memory of the simulator, as ratios within one run.

    PYTHONPATH=. python benchmarks/simulator.py [--rounds N]

Causal flash attention (128 x 512 tiles, online softmax; 4 heads, 2048 tokens, d = 128, float32) on one thread against
torch's scaled_dot_product_attention, a [1, 1] copy, bytes, two cores and four ranks against the same work one after the
other, and instructions per second of a run without data. Times are CPU time: what other processes take of the machine
does not count. Exits 1 when a bar does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import Comparison, peak_memory, time_rounds

import nki_parallel_attn.sim.isa as nisa
import nki_parallel_attn.sim.language as nl
from nki_parallel_attn.sim import ShapeOnly, jit, profile, simulate
from nki_parallel_attn.sim.tensor import NkiTensor
from tests.sim.kernels.flash_attention import flash_attention

HEADS, TOKENS, HEAD_DIM = 4, 2048, 128
COPIES = 2000
LEAST_INSTRUCTIONS = 3000


@dataclass(frozen=True)
class Bar:
    """One result and what it may be at most (or at least, for rates)."""

    what: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        return f"{self.what:<58}{self.value:>12,.2f} {self.unit:<7}{sign} {self.limit:>9,.0f}  {verdict}"


@jit
def copies(source: NkiTensor) -> None:
    """Copy one element COPIES times."""
    src = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    dst = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=src, src=source)
    for _ in range(COPIES):
        nisa.tensor_copy(dst=dst, src=src)


def cpu_seconds_of(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    arguments = (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v)
    heads = [tuple(t[i : i + 1] for t in arguments) for i in range(HEADS)]
    shapes = [ShapeOnly(tuple(t.shape), t.dtype) for t in arguments]
    one = torch.ones(1, 1)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)

    def one_core(checks: bool) -> Any:
        return simulate(flash_attention, target="trn2", checks=checks)(*arguments)

    torch.testing.assert_close(one_core(True)[None], sdpa(), rtol=1e-4, atol=1e-4)
    report = profile(flash_attention, target="trn2")(*shapes)
    instructions = report.instructions

    contenders: dict[str, Callable[[], object]] = {
        "torch": sdpa,
        "unchecked": lambda: one_core(False),
        "checked": lambda: one_core(True),
        "two cores": lambda: simulate(flash_attention[2], target="trn2", checks=False)(*arguments),
        "ranks": lambda: simulate(flash_attention, world_size=HEADS, target="trn2", checks=False)(heads),
        "serial": lambda: [simulate(flash_attention, target="trn2", checks=False)(*head) for head in heads],
        "copies": lambda: simulate(copies, target="trn2", checks=False)(one),
        "shapes": lambda: profile(flash_attention, target="trn2")(*shapes),
    }
    timed = {name: partial(cpu_seconds_of, action) for name, action in contenders.items()}
    seconds = time_rounds(timed, rounds)

    def ratio(contender: str, baseline: str) -> float:
        return Comparison(seconds[baseline], seconds[contender]).median_ratio

    core = report.core()
    tensors = 4 * HEADS * TOKENS * HEAD_DIM * 4
    live = tensors + 128 * (core.sbuf_peak_bytes + core.psum_peak_bytes)
    inputs = sum(t.numel() * t.element_size() for t in arguments)
    used = inputs + peak_memory(lambda: one_core(True))
    bars = [
        Bar("instructions of flash attention", instructions, LEAST_INSTRUCTIONS, "", at_least=True),
        Bar("flash attention, no checks, of torch's time", ratio("unchecked", "torch"), 8, "x"),
        Bar("flash attention, all checks, of torch's time", ratio("checked", "torch"), 16, "x"),
        Bar("a [1, 1] tensor_copy, no checks", 1e6 * min(seconds["copies"]) / COPIES, 40, "us"),
        Bar("bytes of the simulator / live bytes, all checks", used / live, 3, "x"),
        Bar("two cores, of one core's time", 100 * ratio("two cores", "unchecked"), 120, "%"),
        Bar("four ranks, of their time one after the other", 100 * ratio("ranks", "serial"), 120, "%"),
        Bar("instructions without data", instructions / min(seconds["shapes"]), 20_000, "/s", at_least=True),
    ]
    print(f"torch {1e3 * min(seconds['torch']):.1f} ms; medians of {rounds} paired rounds, one thread, CPU time")
    for bar in bars:
        print(bar)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
