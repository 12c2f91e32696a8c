"""How the cost of KV-parallel prefill changes with the sequence and with the ranks: a table and a plot.

    python benchmarks/kvp_prefill_sweep.py --seq-len 2048 4096 --ranks 1 2 4 8    # adds to docs/kvp_prefill.json
    python benchmarks/kvp_prefill_sweep.py --draw    # prints its table, draws docs/kvp_prefill.svg (extra `plot`)

The case is that of kvp_prefill.py: 8 query heads over the ranks, and one process on 2 threads for the same work.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from measure import machine

from kvp_prefill import BASELINE, OURS, THREADS, measure, memory_yardstick

RESULTS = Path(__file__).parent.parent / "docs" / "kvp_prefill.json"
PLOT = RESULTS.with_suffix(".svg")


def measure_row(ranks: int, seq_len: int, rounds: int) -> dict[str, Any]:
    result = measure(ranks, seq_len, rounds, [OURS])
    compared = result.against_baseline(OURS)
    return {
        "ranks": ranks,
        "seq_len": seq_len,
        "rounds": rounds,
        "machine": machine(),
        "one_process_ms": 1e3 * statistics.median(result.seconds[BASELINE]),
        "kv_parallel_ms": 1e3 * statistics.median(result.seconds[OURS]),
        "median_ratio": compared.median_ratio,
        "ratio_of_minima": compared.ratio_of_minima,
        "peak_bytes": result.peak_bytes[OURS],
        "yardstick_bytes": memory_yardstick(ranks, seq_len),
        "stages_ms": {name: 1e3 * value for name, value in result.stages.items()},
    }


def load() -> list[dict[str, Any]]:
    return list(json.loads(RESULTS.read_text())) if RESULTS.exists() else []


def save(rows: list[dict[str, Any]]) -> None:
    """One row a line; a case measured again replaces its row."""
    latest = {(row["ranks"], row["seq_len"]): row for row in rows}
    lines = [json.dumps(latest[key], default=float) for key in sorted(latest)]
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | S | one process, ms | KV-parallel, ms | median ratio | ratio of minima | MiB per rank | of sum |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['ranks']} | {row['seq_len']} | {row['one_process_ms']:.0f} | {row['kv_parallel_ms']:.0f} "
        f"| {row['median_ratio']:.2f} | {row['ratio_of_minima']:.2f} | {row['peak_bytes'] / 2**20:.1f} "
        f"| {row['peak_bytes'] / row['yardstick_bytes']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not outlines
    matplotlib.rcParams["svg.hashsalt"] = "kvp_prefill"  # the same picture, the same file
    import matplotlib.pyplot as plt

    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for ranks in sorted({row["ranks"] for row in rows}):
        mine = sorted((row for row in rows if row["ranks"] == ranks), key=lambda row: int(row["seq_len"]))
        lengths = [row["seq_len"] for row in mine]
        label = f"{ranks} rank{'s' if ranks > 1 else ''}"
        (line,) = time_axes.plot(lengths, [row["median_ratio"] for row in mine], marker="o", label=label)
        color = line.get_color()
        memory_axes.plot(lengths, [row["peak_bytes"] / 2**20 for row in mine], marker="o", color=color, label=label)
        memory_axes.plot(lengths, [row["yardstick_bytes"] / 2**20 for row in mine], ls=":", color=color)
    time_axes.axhline(1, color="grey", lw=0.8)
    time_axes.set(title="Time against one process on 2 threads", ylabel="median of paired ratios", ylim=(0.8, None))
    memory_axes.set(title="Peak memory per rank (dotted: yardstick)", ylabel="MiB", yscale="log")
    for axes in (time_axes, memory_axes):
        axes.set_xscale("log", base=2)
        ticks = sorted({row["seq_len"] for row in rows})
        axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
        axes.set_xlabel("sequence length S")
        axes.legend(frameon=False)
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    for seq_len in options.seq_len:
        for ranks in options.ranks:
            rows = [*load(), measure_row(ranks, seq_len, options.rounds)]
            save(rows)
            print(table(rows[-1:]), flush=True)
    if options.draw:
        print(table(load()))
        draw(load())


if __name__ == "__main__":
    main()
