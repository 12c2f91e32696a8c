"""Inputs of output_projection_cte, and what they should give: in float64, one sum per output, knowing no fold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nki_parallel_attn import DtypeMode, OProjAttentionLayout, QuantizationType
from nki_parallel_attn.kernels.microscaling_torch import pack_x4

from . import oracle

BNdS, BSNd, BNSd = OProjAttentionLayout.BNdS, OProjAttentionLayout.BSNd, OProjAttentionLayout.BNSd
NONE, STATIC, ROW, MX = (QuantizationType[name] for name in ("NONE", "STATIC", "ROW", "MX"))
E4M3FN, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
ELEMENTS = {E4M3FN: oracle.E4M3FN, E5M2: oracle.E5M2, E2M1: oracle.E2M1}
# [B, N, D, S] to each layout.
PERMUTATION = {BNdS: (0, 1, 2, 3), BSNd: (0, 3, 1, 2), BNSd: (0, 1, 3, 2)}


@dataclass(frozen=True)
class Case:
    """Normal activations with a token of zeros; weights with outputs of magnitude about 1.

    Attributes:
        element: of an MX weight.
        magnitude, column_magnitude: of the activations, and of ROW's weight scales, as multiples of the usual ones.
    """

    batch: int = 2
    heads: int = 3
    head_dim: int = 16
    length: int = 7
    hidden: int = 20
    dtype: torch.dtype = torch.float32
    layout: OProjAttentionLayout | None = None
    bias: bool = True
    kind: QuantizationType = NONE
    mode: DtypeMode = DtypeMode.NON_OCP
    target: str = "trn2"
    element: torch.dtype = E4M3FN
    compact: bool = False
    output_dtype: torch.dtype | None = None
    seed: int = 0
    magnitude: float = 1.0
    column_magnitude: float = 1.0

    @property
    def contraction(self) -> int:
        return self.heads * self.head_dim

    @property
    def float8(self) -> oracle.Element:
        """What STATIC and ROW quantise to."""
        ocp = self.mode is DtypeMode.OCP or (self.mode is DtypeMode.AUTO and self.target == "trn3")
        return oracle.E4M3FN if ocp else oracle.E4M3

    def attention(self) -> Tensor:
        """[B, N, D, S]."""
        shape = self.batch, self.heads, self.head_dim, self.length
        x = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed)).mul(self.magnitude).to(self.dtype)
        x[0, :, :, 0] = 0
        return x

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed + 1)

    def _bias(self) -> Tensor:
        return torch.from_numpy(self._rng().standard_normal((1, self.hidden))).to(self.dtype)

    def _plain_weight(self) -> Tensor:
        weight = self._rng().standard_normal((self.contraction, self.hidden)) / np.sqrt(self.contraction)
        return torch.from_numpy(weight).to(self.dtype)

    @cached_property
    def quantized_weight(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Codes [K, H], and scales: STATIC [], ROW [H] float32, MX bytes, dense or compact."""
        rng, k, h = self._rng(), self.contraction, self.hidden
        values = (ELEMENTS[self.element] if self.kind is MX else self.float8).values()
        codes = rng.choice(np.flatnonzero(np.isfinite(values)), (k, h)).astype(np.uint8)
        if self.kind is MX:
            shape = (k // 128, h // 128) if self.compact else (k // 32, h)
            return codes, rng.integers(110, 124, shape, dtype=np.uint8)
        scales = rng.uniform(0.5, 2, h if self.kind is ROW else ()) / 240 / np.sqrt(k)
        return codes, np.asarray(scales * self.column_magnitude, np.float32)

    def input_scale(self) -> float:
        """STATIC's: so that a few activations saturate."""
        return float(np.float32(2.0 / self.float8.largest))

    def arguments(self) -> dict[str, Any]:
        """Arguments of output_projection_cte."""
        implied = BSNd if self.kind is ROW else BNdS
        attention = self.attention().permute(PERMUTATION[self.layout or implied]).contiguous()
        given: dict[str, Any] = {
            "attention": attention,
            "attention_layout": self.layout,
            "quantization_type": self.kind,
            "dtype_mode": self.mode,
            "target": self.target,
            "output_dtype": self.output_dtype,
        }
        if self.bias:
            given["bias"] = self._bias()
        if self.kind is NONE:
            return {**given, "weight": self._plain_weight()}
        codes, scales = self.quantized_weight
        elements = torch.from_numpy(codes).view(self.element if self.kind is MX else E4M3FN)
        if self.kind is MX:
            given["compact_weight_scales"] = self.compact
            return {**given, "weight": pack_x4(elements), "weight_scales": torch.from_numpy(scales)}
        given["weight"] = elements
        if self.kind is ROW:
            return {**given, "weight_scales": torch.from_numpy(scales)[None]}
        given["input_scales"] = torch.full((128, 1), self.input_scale())
        return {**given, "weight_scales": torch.full((128, 1), float(scales))}

    def factors(self) -> tuple[oracle.Array, oracle.Array]:
        """The values that are multiplied: [B * S, K] and [K, H], float64, scales included."""
        x = self.attention().double().numpy()
        rows = np.stack([x[b, :, :, s].reshape(-1) for b in range(self.batch) for s in range(self.length)])
        if self.kind is NONE:
            return rows, self._plain_weight().double().numpy()
        codes, scales = self.quantized_weight
        if self.kind is MX:
            if self.compact:
                scales = np.repeat(np.repeat(scales, 4, axis=0), 128, axis=1)
            return oracle.mx_dequantized(rows, oracle.E4M3FN), oracle.mx_weight(codes, scales, ELEMENTS[self.element])
        weight = self.float8.values()[codes] * scales.astype(np.float64)
        if self.kind is ROW:
            elements, row_scales = oracle.quantized_rows(rows, self.float8)
            return elements * row_scales, weight
        return oracle.quantized_static(rows, self.input_scale(), self.float8) * self.input_scale(), weight

    def expected(self) -> tuple[Tensor, Tensor]:
        """The result [B, S, H], and how far from it another order of float32 sums and its rounding may be, float64."""
        left, right = self.factors()
        product = left @ right
        magnitude = np.abs(left) @ np.abs(right)
        if self.bias:
            bias = self._bias().double().numpy()
            product, magnitude = product + bias, magnitude + np.abs(bias)
        shape = self.batch, self.length, self.hidden
        return torch.from_numpy(product).view(shape), torch.from_numpy(self._tolerance(product, magnitude)).view(shape)

    def _tolerance(self, product: oracle.Array, magnitude: oracle.Array) -> oracle.Array:
        """K + 4 roundings of float32 (sum, bias, three scales); two of the output's dtype, or its subnormals'."""
        output = self.output_dtype or (torch.bfloat16 if self.kind is MX else self.dtype)
        accumulation = torch.finfo(torch.float64 if self.dtype == torch.float64 else torch.float32).eps / 2
        info = torch.finfo(output)
        return (self.contraction + 4) * accumulation * magnitude + info.eps * np.abs(product) + info.tiny * info.eps


def close(got: Tensor, case: Case) -> None:
    """Assert that a result is as close to the case's as its dtype and sums allow."""
    expected, tolerance = case.expected()
    output = case.output_dtype or (torch.bfloat16 if case.kind is MX else case.dtype)
    assert got.dtype == output
    assert got.shape == expected.shape
    excess = (got.detach().double() - expected).abs() - tolerance
    assert bool((excess <= 0).all()), f"{float(excess.max()):.3g} beyond the tolerance of {float(tolerance.min()):.3g}"
