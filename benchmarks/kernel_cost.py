"""What the cost model says of the NKI kernels: makespan against the least that each engine needs.

    python benchmarks/kernel_cost.py [--details] [--long] [--json PATH]

One row per case. "least" columns are what the work takes an engine that never waits: for attention Tensor does two
matmuls per tile of scores and Scalar one exponential per score, for the projection Tensor does its product and Vector
and Scalar share the copies out of PSUM; DMA moves each operand and the result once. KV-parallel prefill besides passes
Vector once over the scores, and moves through HBM what its collectives take and give. A kernel can be no faster than
the largest of them; "of the bound" is how near it comes. A model, not a measurement: docs/cost_model.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nki_parallel_attn.kernels.attention_const_max import attention_const_max
from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte import attention_kv_parallel_segmented_cte
from nki_parallel_attn.kernels.output_projection_cte import output_projection_cte
from nki_parallel_attn.sim import CostReport, ReplicaGroup, profile
from nki_parallel_attn.sim.cost_collectives import exchange_of
from nki_parallel_attn.sim.cost_constants import costs_of
from nki_parallel_attn.sim.targets import get_target
from nki_parallel_attn.topology.types import AttentionLayout, OProjAttentionLayout, QuantizationType

HEAD_DIM = 128
ENGINES = ("tensor", "scalar", "vector", "dma", "collective")
PEAK_TFLOPS = 79.0  # bfloat16, one core: trainium2_arch.rst, trainium3_arch.rst


@dataclass(frozen=True)
class Row:
    """One kernel in one case.

    Attributes:
        least_ns: by engine of one core, the time that the work takes at full rate.
        flops: useful ones of one core.
        least_bytes: of the DMAs of all cores; sent_bytes: by the collectives of one rank, by formula. 0: not given.
    """

    kernel: str
    case: str
    report: CostReport
    least_ns: dict[str, float]
    flops: float
    least_bytes: int = 0
    sent_bytes: int = 0

    @property
    def bound_ns(self) -> float:
        return max(self.least_ns.values())

    @property
    def of_bound(self) -> float:
        return self.bound_ns / self.report.makespan_ns

    @property
    def of_peak(self) -> float:
        return self.flops / (PEAK_TFLOPS * 1e3 * self.report.makespan_ns)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "case": self.case,
            "target": self.report.target,
            "makespan_ns": self.report.makespan_ns,
            "least_ns": self.least_ns,
            "of_bound": self.of_bound,
            "of_peak": self.of_peak,
            "dma_bytes": self.report.dma_bytes,
            "least_dma_bytes": self.least_bytes,
            "collective_bytes": max(self.report.collective_bytes.values(), default=0),
            "least_collective_bytes": self.sent_bytes,
            "sbuf_peak_bytes": max(core.sbuf_peak_bytes for core in self.report.cores),
            "psum_peak_bytes": max(core.psum_peak_bytes for core in self.report.cores),
        }


def const_max(
    heads: int,
    queries: int,
    keys: int,
    target: str = "trn2",
    lnc: int = 1,
    layout: AttentionLayout = AttentionLayout.HEAD_MAJOR,
) -> Row:
    """attention_const_max in bfloat16. Cores share the heads or, with an odd number of them, the queries."""

    def shaped(rows: int) -> torch.Tensor:
        shape = (HEAD_DIM, rows) if layout is AttentionLayout.HEAD_MAJOR else (rows, HEAD_DIM)
        return torch.empty(heads, *shape, dtype=torch.bfloat16, device="meta")

    values = torch.empty(heads, keys, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    kernel = profile(attention_const_max, lnc=lnc, target=target)
    report = kernel(shaped(queries), shaped(keys), values, 4.0, None, layout, layout)
    costs = costs_of(get_target(target))
    scores = heads * queries * keys / lnc
    flops = 4 * scores * HEAD_DIM
    moved = 2 * heads * HEAD_DIM * 2 * (queries + keys)  # Q and the result, K and V, of 2 bytes
    return Row(
        "const_max",
        f"{heads} x {queries} x {keys}, lnc {lnc}, {layout.name.lower()}",
        report,
        {
            "tensor": flops / costs.peak_flops_per_ns,
            "scalar": scores / costs.array_size / costs.scalar_ghz,
            "vector": heads * queries / costs.array_size * HEAD_DIM / lnc / costs.vector_ghz,  # the division
            "dma": moved / lnc / min(costs.dma_peak, costs.hbm_share),
            "collective": 0.0,
        },
        flops,
    )


def const_max_rows(long: bool) -> Iterator[Row]:
    yield const_max(1, 8192, 8192)
    yield const_max(1, 8192, 8192, "trn3")
    yield const_max(1, 8192, 8192, layout=AttentionLayout.SEQ_MAJOR)
    yield const_max(1, 8192, 8192, lnc=2)
    yield const_max(8, 2048, 2048, lnc=2)
    yield const_max(16, 512, 512)
    yield const_max(1, 1000, 3333)
    yield const_max(1, 1024, 131072)
    if long:
        yield const_max(1, 16384, 131072)


def projection(
    batch: int,
    heads: int,
    depth: int,
    length: int,
    hidden: int,
    target: str = "trn2",
    lnc: int = 2,
    kind: QuantizationType = QuantizationType.NONE,
    bias: bool = False,
    layout: OProjAttentionLayout | None = None,
) -> Row:
    """output_projection_cte of bfloat16 activations. Cores share the columns."""
    by_row = kind is QuantizationType.ROW
    layout = layout or (OProjAttentionLayout.BSNd if by_row else OProjAttentionLayout.BNdS)
    dims = {
        OProjAttentionLayout.BNdS: (heads, depth, length),
        OProjAttentionLayout.BSNd: (length, heads, depth),
        OProjAttentionLayout.BNSd: (heads, length, depth),
    }[layout]

    def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    contraction, float8 = heads * depth, torch.float8_e4m3fn
    weight, scales = shaped(contraction, hidden, dtype=float8), shaped(1 if by_row else 128, 1, dtype=torch.float32)
    if kind is QuantizationType.NONE:
        weight = shaped(contraction, hidden)
    elif kind is QuantizationType.MX:
        weight = shaped(contraction // 4, hidden, 4, dtype=float8)
        scales = shaped(contraction // 32, hidden, dtype=torch.uint8)
    elif by_row:
        scales = shaped(1, hidden, dtype=torch.float32)
    report = profile(output_projection_cte, lnc=lnc, target=target)(
        shaped(batch, *dims),
        weight,
        shaped(1, hidden) if bias else None,
        kind,
        scales if kind is QuantizationType.STATIC else None,
        None if kind is QuantizationType.NONE else scales,
        attention_layout=layout,
    )
    costs = costs_of(get_target(target))
    rows, columns = batch * length, hidden // lnc
    flops = 2 * rows * contraction * columns
    # What one pass of the Tensor Engine contracts, in units of 128.
    together = {QuantizationType.NONE: 1, QuantizationType.MX: 4}.get(kind, 2)
    copies = rows / costs.array_size * columns / (costs.vector_ghz + costs.scalar_ghz)
    moved = 2 * rows * contraction + weight.dtype.itemsize * contraction * columns + 2 * rows * columns
    case = f"{rows} x {contraction} x {hidden}, lnc {lnc}, {layout.name}"
    return Row(
        "projection",
        case + ("" if kind is QuantizationType.NONE else f", {kind.name}") + (", bias" if bias else ""),
        report,
        {
            "tensor": flops / together / costs.peak_flops_per_ns,
            "scalar": copies,
            "vector": copies,
            "dma": moved / min(costs.dma_peak, costs.hbm_share),
            "collective": 0.0,
        },
        flops,
    )


def projection_rows(long: bool) -> Iterator[Row]:
    quantized = QuantizationType
    yield projection(1, 8, 128, 8192, 8192)
    yield projection(1, 8, 128, 8192, 8192, bias=True)
    yield projection(1, 8, 128, 8192, 8192, layout=OProjAttentionLayout.BNSd)
    yield projection(1, 8, 128, 8192, 8192, "trn3")
    yield projection(1, 16, 80, 2048, 4096)
    yield projection(1, 17, 128, 8192, 16384, bias=True)
    yield projection(1, 1, 128, 8192, 8192)
    yield projection(1, 8, 128, 8192, 8192, kind=quantized.STATIC)
    yield projection(1, 8, 128, 8192, 8192, kind=quantized.ROW)
    yield projection(1, 8, 128, 8192, 8192, kind=quantized.ROW, bias=True)
    yield projection(1, 8, 128, 8192, 8192, "trn3", kind=quantized.MX)
    if long:
        yield projection(1, 17, 128, 131072, 32768, bias=True)


def kv_prefill(length: int, lnc: int = 1, target: str = "trn2", ranks: int = 4, own_heads: int = 2) -> Row:
    """attention_kv_parallel_segmented_cte in bfloat16, causal, round-robin in blocks of 128, one KV head; rank 0, which
    sees most."""
    block, heads, slots = 128, ranks * own_heads, length // ranks

    def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    cache = shaped(slots // block, 1, block, HEAD_DIM)
    number = shaped(1, 1, dtype=torch.int32)
    run = profile(attention_kv_parallel_segmented_cte, world_size=ranks, lnc=lnc, target=target, representative=0)
    report = run(
        shaped(own_heads, length, HEAD_DIM),
        cache,
        cache,
        shaped(1, slots // block, dtype=torch.int32),
        number,
        ReplicaGroup([list(range(ranks))]),
        ranks,
        block,
        8192,
        HEAD_DIM**-0.5,
        kvp_rank_id=number,
        kvp_group_size=ranks,
    )
    costs = costs_of(get_target(target))
    # Rank 0 holds every ranks-th block from the first on: the scores of the rows that see a block wholly, and half of
    # those of the rows in it.
    blocks = range(0, length // block, ranks)
    scores = heads * sum((length - (b + 1) * block) * block + block * (block + 1) // 2 for b in blocks) / lnc
    q, partial = 2 * own_heads * length * HEAD_DIM, own_heads * length * (2 * HEAD_DIM + 4)
    # Q is read, written for the all-gather, and read gathered; partial results are written and read around the
    # all-to-all; K, V and the result move once.
    moved = 2 * q + ranks * q + 2 * ranks * partial + 2 * 2 * slots * HEAD_DIM + q
    group = list(range(ranks))
    collectives = sum(
        exchange_of(name, group, [source], [destination], lnc, costs).ns
        for name, source, destination in (
            ("all_gather", q, ranks * q),
            ("all_to_all", ranks * partial, ranks * partial),
        )
    )
    flops = 4 * scores * HEAD_DIM
    return Row(
        "kv_prefill",
        f"{ranks} ranks, {own_heads} heads each, {length}, lnc {lnc}",
        report,
        {
            "tensor": flops / costs.peak_flops_per_ns,
            "scalar": scores / costs.array_size / costs.scalar_ghz,
            "vector": scores / costs.array_size / costs.vector_ghz,
            "dma": moved / lnc / min(costs.dma_peak, costs.hbm_share),
            "collective": collectives,
        },
        flops,
        moved,
        (ranks - 1) * (q + partial),
    )


def kv_prefill_rows(long: bool) -> Iterator[Row]:
    yield kv_prefill(8192)
    yield kv_prefill(8192, lnc=2)
    if long:
        yield kv_prefill(131072)


KERNELS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "const_max": const_max_rows,
    "kv_prefill": kv_prefill_rows,
    "projection": projection_rows,
}


def table(rows: list[Row]) -> str:
    """The rows in Markdown; times in microseconds."""
    titles = ["kernel", "case", "target", "makespan", *(f"least {name}" for name in ENGINES)]
    titles += ["of the bound", f"of {PEAK_TFLOPS:g} TFLOP/s", "SBUF", "PSUM", "DMA MB", "collective MB"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        facts = row.to_dict()
        times = " | ".join(f"{row.least_ns[name] / 1e3:.1f}" for name in ENGINES)
        sbuf = f"{facts['sbuf_peak_bytes'] / row.report.sbuf_capacity:.0%}"
        psum = f"{facts['psum_peak_bytes'] / row.report.psum_capacity:.0%}"
        bytes_moved = f"{facts['dma_bytes'] / 1e6:.1f}"
        if row.least_bytes:
            bytes_moved += f", {facts['dma_bytes'] / row.least_bytes:.3f} x least"
        sent = f"{facts['collective_bytes'] / 1e6:.2f} of {row.sent_bytes / 1e6:.2f}" if row.sent_bytes else "none"
        lines.append(
            f"| {row.kernel} | {row.case} | {row.report.target} | {row.report.makespan_ns / 1e3:.1f} | {times} "
            f"| {row.of_bound:.3f} | {row.of_peak:.3f} | {sbuf} | {psum} | {bytes_moved} | {sent} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=sorted(KERNELS), action="append", help="all by default")
    parser.add_argument("--details", action="store_true", help="each case's report: busy and idle times, and why")
    parser.add_argument("--long", action="store_true", help="also cases that take minutes")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows = [row for name in options.kernel or KERNELS for row in KERNELS[name](options.long)]
    print(table(rows))
    if options.details:
        for row in rows:
            print(f"\n{row.kernel}, {row.case}\n{row.report}")
    if options.json:
        options.json.write_text(json.dumps([row.to_dict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
