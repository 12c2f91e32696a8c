"""A call of the kernel with random inputs, and what it should give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nki_parallel_attn.kernels.output_projection_cte import output_projection_cte
from nki_parallel_attn.sim import simulate
from nki_parallel_attn.topology.types import DtypeMode, OProjAttentionLayout, QuantizationType
from tests.output_projection_nki import oracle

BNdS, BSNd, BNSd = OProjAttentionLayout.BNdS, OProjAttentionLayout.BSNd, OProjAttentionLayout.BNSd
NONE, STATIC, ROW, MX = (QuantizationType[name] for name in ("NONE", "STATIC", "ROW", "MX"))
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
PACKED = {"e4m3fn": oracle.E4M3FN, "e5m2": oracle.E5M2, "float4": oracle.FLOAT4}
ORDER = {BNdS: (0, 2, 3, 1), BSNd: (0, 1, 2, 3), BNSd: (0, 2, 1, 3)}  # of [B, S, N, D]


@dataclass
class Case:
    """attention ~ N(0, 1), weight ~ N(0, 1 / (N * D)).

    Attributes:
        shape: B, N, D, S, H.
        ocp: float8 up to 448.
        elements, compact: MX weights and their scales.
        change: edits attention as [B, S, N * D] in place.
    """

    shape: tuple[int, int, int, int, int]
    kind: QuantizationType = NONE
    layout: OProjAttentionLayout | None = None
    dtype: torch.dtype = BFLOAT16
    bias: bool = False
    output_dtype: torch.dtype | None = None
    ocp: bool = False
    scale: float = 0.03
    elements: str = "e4m3fn"
    compact: bool = False
    change: Any = None
    seed: int = 0
    arguments: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        batch, heads, depth, length, hidden = self.shape
        contraction = heads * depth
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(batch, length, contraction, generator=generator).to(self.dtype)
        if self.change is not None:
            self.change(x)
        weight = torch.randn(contraction, hidden, generator=generator) / contraction**0.5
        bias = torch.randn(1, hidden, generator=generator).to(self.dtype) if self.bias else None
        layout = self.layout or (BSNd if self.kind is ROW else BNdS)
        self.arguments = {
            "attention": x.reshape(batch, length, heads, depth).permute(ORDER[layout]).contiguous(),
            "bias": bias,
            "quantization_type": self.kind,
            "output_dtype": self.output_dtype,
            "attention_layout": self.layout,
            "dtype_mode": DtypeMode.OCP if self.ocp else DtypeMode.NON_OCP,
        }
        rows = x.flatten(0, 1).double().numpy()
        values = oracle.E4M3FN if self.ocp else oracle.E4M3
        if self.kind is NONE:
            weight = weight.to(self.dtype)
            self.product = oracle.plain(rows, weight.double().numpy())
        elif self.kind is MX:
            weight, dense = self._mx_weight(generator, contraction, hidden)
            self.product = oracle.plain(oracle.mx_quantized(rows), dense)
        elif self.kind is STATIC:
            scales = torch.tensor([self.scale, 1.5 / contraction**0.5 / values[-1]], dtype=FLOAT32)
            quantized = oracle.nearest((weight / scales[1]).double().numpy(), values)
            weight = torch.from_numpy(quantized).to(torch.float8_e4m3fn)
            self.arguments["input_scales"] = scales[0].expand(128, 1).clone()
            self.arguments["weight_scales"] = scales[1].expand(128, 1).clone()
            self.product = oracle.with_float8(rows, scales[0].item(), quantized, scales[1].item(), values)
        else:
            scales = weight.abs().amax(0, keepdim=True) / values[-1]
            quantized = oracle.nearest((weight / scales).double().numpy(), values)
            weight = torch.from_numpy(quantized).to(torch.float8_e4m3fn)
            self.arguments["weight_scales"] = scales
            columns = scales.double().numpy()
            self.product = oracle.with_float8(rows, oracle.row_scale(rows, values), quantized, columns, values)
        self.arguments["weight"] = weight
        self.bias_values = 0.0 if bias is None else bias.double().numpy()

    def _mx_weight(self, generator: torch.Generator, contraction: int, hidden: int) -> tuple[Tensor, np.ndarray]:
        """Packed bytes and dequantised values: any finite element, scales from 2^-11 to 2^-4."""
        values = PACKED[self.elements]
        bits = 4 if self.elements == "float4" else 8
        codes = torch.randint(0, len(values), (contraction, hidden), generator=generator)
        signs = torch.randint(0, 2, codes.shape, generator=generator)
        shape = (contraction // 128, -(-hidden // 128)) if self.compact else (contraction // 32, hidden)
        scales = torch.randint(116, 124, shape, generator=generator, dtype=torch.uint8)
        self.arguments |= {"weight_scales": scales, "compact_weight_scales": self.compact}
        words = (codes + (signs << (bits - 1))).numpy().reshape(-1, 4, hidden)
        packed = sum(words[:, q].astype(np.uint32) << (bits * q) for q in range(4))
        if bits == 4:
            packed = packed.astype(np.uint16)
        packed_bytes = torch.from_numpy(packed[:, :, None].view(np.uint8))
        if self.elements != "float4":
            packed_bytes = packed_bytes.view(torch.float8_e5m2 if self.elements == "e5m2" else torch.float8_e4m3fn)
        dense = values[codes.numpy()] * np.where(signs.numpy() == 1, -1.0, 1.0)
        return packed_bytes, oracle.mx_weight(dense, scales.numpy())

    @property
    def out_dtype(self) -> torch.dtype:
        return self.output_dtype or (BFLOAT16 if self.kind is MX else self.dtype)

    def run(self, target: str | None = None, lnc: int = 1, seed: int | None = None, **more: Any) -> Tensor:
        """The kernel on the simulator, all checks on."""
        if target is None:
            target = "trn3" if self.kind is MX or self.ocp else "trn2"
        run = simulate(output_projection_cte, lnc=lnc, target=target, checks=True, seed=seed)
        result: Tensor = run(**(self.arguments | more))
        return result

    def expected(self) -> np.ndarray:
        """[B * S, H] float64; infinity where the output's dtype ends."""
        result: np.ndarray = self.product.value + self.bias_values
        return np.where(np.abs(result) > torch.finfo(self.out_dtype).max, np.copysign(np.inf, result), result)

    def bound(self) -> np.ndarray:
        _, heads, depth, _, _ = self.shape
        dtype = str(self.out_dtype).removeprefix("torch.")
        return oracle.bound(self.product, self.bias_values, heads * depth, dtype)

    def check(self, target: str | None = None, lnc: int = 1, seed: int | None = None) -> None:
        """Run and compare."""
        got = self.run(target, lnc, seed)
        batch, _, _, length, hidden = self.shape
        assert got.shape == (batch, length, hidden)
        assert got.dtype is self.out_dtype
        self.compare(got)

    def compare(self, got: Tensor, rows: list[int] | None = None) -> None:
        """Within the bound, NaN and infinity where the oracle has them; for some rows only if asked for."""
        chosen = slice(None) if rows is None else rows
        values, expected = got.flatten(0, 1).double().numpy()[chosen], self.expected()[chosen]
        finite = np.isfinite(expected)
        assert np.array_equal(values[~finite], expected[~finite], equal_nan=True)
        assert np.isfinite(values[finite]).all()
        worst = (np.abs(values[finite] - expected[finite]) / self.bound()[chosen][finite]).max()
        assert worst <= 1, f"deviates {worst:.3g} times the bound"
