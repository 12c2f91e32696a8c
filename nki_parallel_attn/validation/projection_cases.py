"""output_projection_cte: layouts of the attention, a slice of the caller's tensor, and the quantised products.

The quantised cases take numbers that every format in them holds, with powers of two as scales: quantising then changes
nothing and all sums are exact, so that the rounding of the result is all there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nki_parallel_attn.ops.output_projection_cte import output_projection_cte
from nki_parallel_attn.topology.types import OProjAttentionLayout, QuantizationType
from nki_parallel_attn.validation.case import Case, Deviation, Place, compare

KERNEL = "output_projection_cte"
BATCH, HEADS, HEAD_DIM, LENGTH, HIDDEN = 2, 4, 64, 161, 512
CONTRACTION = HEADS * HEAD_DIM
FP8 = torch.float8_e4m3fn
ORDER = {"BNdS": (0, 2, 3, 1), "BSNd": (0, 1, 2, 3), "BNSd": (0, 2, 1, 3)}
"""Dims of [B, S, N, D]."""
LARGEST = 1.875
"""240 * 2**-7: with it as a token's largest value, ROW's scale is a power of two."""
OFFSET, ROWS_OF_OUT = 3, LENGTH + 9


@dataclass(frozen=True)
class ProjectionCase(Case):
    """attention @ weight + bias; in the scenario "slice" into rows of a larger tensor, whose others stay."""

    def exists_on(self, backend: str, target: str) -> bool:
        return self.scenario != "mx" or target == "trn3"

    def run(self, place: Place) -> Deviation:
        generator = place.generator(self)
        quantised = self.scenario in ("static", "row", "mx")
        if quantised:
            x, weight, arguments = self._exact(generator)
        else:
            x = torch.randn(BATCH, LENGTH, CONTRACTION, generator=generator).to(self.torch_dtype)
            weight = torch.randn(CONTRACTION, HIDDEN, generator=generator).to(self.torch_dtype) / math.sqrt(CONTRACTION)
            arguments = {"weight": weight}
        bias = torch.randint(-8, 9, (1, HIDDEN), generator=generator).to(self.torch_dtype) / 4
        expected = x.double() @ weight.double() + bias.double()
        if self.scenario == "slice":
            whole = torch.randn(BATCH, ROWS_OF_OUT, HIDDEN, generator=generator).to(self.torch_dtype)
            arguments |= {"out": whole, "out_s_offset": OFFSET}
            whole_expected = whole.double()
            whole_expected[:, OFFSET : OFFSET + LENGTH] = expected
            expected = whole_expected
        out = output_projection_cte(
            **place.to_device(  # type: ignore[arg-type]
                {
                    **arguments,
                    "attention": x.view(BATCH, LENGTH, HEADS, HEAD_DIM).permute(ORDER[self.layout]).contiguous(),
                    "bias": bias,
                }
            ),
            attention_layout=OProjAttentionLayout[self.layout],
            backend=place.backend,
            lnc=self.lnc,
            target=place.target,
        )
        # The result is rounded once; sums of random numbers err as sqrt(terms), Higham and Mary 2019.
        tolerance = torch.finfo(self.torch_dtype).eps / 2 * float(expected.abs().max())
        if not quantised:
            magnitude = float((x.double().abs() @ weight.double().abs()).max())
            tolerance += 2 * math.sqrt(CONTRACTION) * torch.finfo(torch.float32).eps / 2 * magnitude
        return compare(out, expected, self.torch_dtype, tolerance)

    def _exact(self, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, object]]:
        """Attention [B, S, N*D], the weight that it is to be multiplied with, and the arguments that stand for it."""
        values = torch.tensor([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0])
        x = values[torch.randint(len(values), (BATCH, LENGTH, CONTRACTION), generator=generator)]
        x[:, :, 0] = LARGEST
        elements = torch.randint(-3, 4, (CONTRACTION, HIDDEN), generator=generator) / 2
        kind = QuantizationType[self.scenario.upper()]
        scales: dict[str, Tensor] = {}
        if kind is QuantizationType.STATIC:
            scales = {"input_scales": torch.full((128, 1), 2.0**-6), "weight_scales": torch.full((128, 1), 2.0**-4)}
            weight = elements * 2.0**-4
        elif kind is QuantizationType.ROW:
            scales = {"weight_scales": 2.0 ** -torch.randint(3, 6, (1, HIDDEN), generator=generator)}
            weight = elements * scales["weight_scales"]
        else:
            # An exponent of 127 is a scale of 1.
            exponents = torch.randint(122, 125, (CONTRACTION // 32, HIDDEN), generator=generator)
            scales = {"weight_scales": exponents.to(torch.uint8)}
            weight = elements * (2.0 ** (exponents - 127.0)).repeat_interleave(32, 0)
            elements = elements.view(-1, 4, HIDDEN).transpose(1, 2).contiguous()
        return x.to(self.torch_dtype), weight, {"weight": elements.to(FP8), "quantization_type": kind, **scales}


def projection_cases() -> Iterator[Case]:
    """Layouts, then dtypes, a slice and the quantised products in one layout each. Ranks do not work together here."""
    for lnc in (1, 2):
        for layout in ORDER:
            yield ProjectionCase(KERNEL, layout, "plain", "bfloat16", 1, lnc)
        for dtype in ("float16", "float32"):
            yield ProjectionCase(KERNEL, "BNdS", "plain", dtype, 1, lnc)
        yield ProjectionCase(KERNEL, "BSNd", "slice", "bfloat16", 1, lnc)
        for layout, scenario in (("BNdS", "static"), ("BSNd", "row"), ("BNdS", "mx")):
            yield ProjectionCase(KERNEL, layout, scenario, "bfloat16", 1, lnc)
