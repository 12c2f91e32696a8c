"""output_projection_cte's torch twin against torch's matmul plus bias on the same operands, already folded.

    python benchmarks/output_projection.py            # the case that docs/quantization.md quotes
    python benchmarks/output_projection.py --quick    # a short look at a small one

The baseline multiplies a contiguous [B*S, N*D] by the weight and adds the bias in a second step; it folds nothing. The
contenders are calls as a user makes them, checks included, on attention in each layout. Beside them, for bfloat16, the
float32 baseline and what a call of each quantisation type takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import Comparison, machine, peak_memory, seconds_of, time_rounds
from torch import Tensor

from nki_parallel_attn import OProjAttentionLayout, QuantizationType, output_projection_cte
from nki_parallel_attn.kernels.microscaling_torch import pack_x4, quantize_mx
from nki_parallel_attn.kernels.quantization_torch import FLOAT8_E4M3_MAX, to_fp8

THREADS = 2
BATCH, HEADS, HEAD_DIM = 2, 8, 128
BASELINE = "matmul + bias"
TIME_BAR = 1.1
SECONDS_PER_CASE = 30
# Orders of [B, S, N, D] that make the layouts, and back.
ORDERS = {"BNdS": (0, 2, 3, 1), "BSNd": (0, 1, 2, 3), "BNSd": (0, 2, 1, 3)}
# Results of magnitude about 1; both sides may round before they add the bias.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8 * 3 * 2**-9}


class Operands:
    """Normal attention, weight and bias of one case, attention in every layout.

    Attributes:
        rows: [B*S, N*D], contiguous.
        attention: by layout.
    """

    def __init__(self, length: int, hidden: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        contraction = HEADS * HEAD_DIM
        tokens = torch.randn(BATCH, length, HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.rows = tokens.view(-1, contraction)
        self.attention = {name: tokens.permute(order).contiguous() for name, order in ORDERS.items()}
        self.weight = (torch.randn(contraction, hidden, generator=generator) / contraction**0.5).to(dtype)
        self.bias = torch.randn(1, hidden, generator=generator).to(dtype)

    def plain(self) -> Tensor:
        product: Tensor = self.rows @ self.weight
        return product + self.bias

    def project(self, layout: str) -> Tensor:
        return output_projection_cte(
            self.attention[layout], self.weight, self.bias, attention_layout=OProjAttentionLayout[layout]
        )


def quantised(operands: Operands) -> dict[str, Callable[[], Tensor]]:
    """A call of each quantisation type on 16-bit attention."""
    weight, attention = operands.weight.float(), operands.attention
    scale = weight.abs().max() / FLOAT8_E4M3_MAX
    columns = weight.abs().amax(0, keepdim=True) / FLOAT8_E4M3_MAX
    elements, mx_scales = quantize_mx(weight.t())
    calls: dict[str, tuple[str, Tensor, dict[str, Any]]] = {
        "STATIC": (
            "BNdS",
            to_fp8(weight / scale, FLOAT8_E4M3_MAX),
            {"weight_scales": scale.repeat(128, 1), "input_scales": torch.full((128, 1), 1 / 60)},
        ),
        "ROW": ("BSNd", to_fp8(weight / columns, FLOAT8_E4M3_MAX), {"weight_scales": columns}),
        "MX": ("BNdS", pack_x4(elements.t()), {"weight_scales": mx_scales.t().contiguous(), "target": "trn3"}),
    }
    return {
        name: partial(
            output_projection_cte,
            attention[layout],
            stored,
            operands.bias,
            quantization_type=QuantizationType[name],
            **arguments,
        )
        for name, (layout, stored, arguments) in calls.items()
    }


def measure(length: int, hidden: int, dtype: torch.dtype, rounds: int) -> bool:
    """Print one case; whether every layout holds the bar."""
    operands = Operands(length, hidden, dtype)
    expected = operands.rows.float() @ operands.weight.float() + operands.bias.float()
    calls = {name: partial(operands.project, name) for name in ORDERS}
    for name, call in calls.items():
        deviation = float((call().view(-1, hidden).float() - expected).abs().max())
        if not deviation <= TOLERANCE[dtype]:
            raise AssertionError(f"{name} deviates by {deviation}, more than {TOLERANCE[dtype]}")
    timed: dict[str, Callable[[], object]] = {BASELINE: operands.plain, **calls}
    if dtype != torch.float32:
        timed |= {"float32 " + BASELINE: Operands(length, hidden, torch.float32).plain, **quantised(operands)}
    # torch's 16-bit products take a hundred times as long on some CPUs.
    rounds = max(3, min(rounds, int(SECONDS_PER_CASE / seconds_of(operands.plain) / len(timed))))
    seconds = time_rounds({name: partial(seconds_of, call) for name, call in timed.items()}, rounds)
    memory = {name: peak_memory(call) for name, call in timed.items()}
    print(f"\n{dtype}, B={BATCH}, S={length}, N={HEADS}, D={HEAD_DIM}, H={hidden}, {rounds} rounds")
    print(f"{'':24}{'median ms':>12}{'min ms':>10}{'median ratio':>15}{'ratio of minima':>17}{'peak MiB':>11}")
    for name, values in seconds.items():
        compared = Comparison(seconds[BASELINE], values)
        times = f"{statistics.median(values) * 1e3:12.1f}{min(values) * 1e3:10.1f}"
        ratios = f"{compared.median_ratio:15.3f}{compared.ratio_of_minima:17.3f}"
        print(f"{name:24}{times}{ratios}{memory[name] / 2**20:11.1f}")
    worst = max(Comparison(seconds[BASELINE], seconds[name]).median_ratio for name in calls)
    print(f"time of {BASELINE}: {worst:.3f}, at most {TIME_BAR}: {'holds' if worst <= TIME_BAR else 'BROKEN'}")
    return worst <= TIME_BAR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="one of them; both by default")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="length 256, hidden 512, 5 rounds")
    options = parser.parse_args()
    if options.quick:
        options.length, options.hidden, options.rounds = 256, 512, 5
    torch.set_num_threads(THREADS)
    print(machine())
    dtypes = [getattr(torch, options.dtype)] if options.dtype else list(TOLERANCE)
    held = [measure(options.length, options.hidden, dtype, options.rounds) for dtype in dtypes]
    if not all(held):
        sys.exit(1)


if __name__ == "__main__":
    main()
