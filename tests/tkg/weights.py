"""Quantised weights of the tests' projections: what is handed over, and the float64 values that the oracle multiplies.

Packing is written here by its definition, element by element: word p, lane q holds contraction row 4p + q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass(frozen=True)
class Weight:
    """
    Attributes:
        stored: [K, N], packed [K/4, N, 4], or float4 [K/4, N, 2] bytes.
        values: [K, N] float64, with MX scales.
        scales: MX: [K/32, N] bytes.
    """

    stored: Tensor
    values: Tensor
    scales: Tensor | None = None

    def columns(self, index: Tensor) -> Tensor:
        return self.stored.view(torch.uint8)[:, index].view(self.stored.dtype)

    def rows(self, rows: slice) -> Tensor:
        per = 1 if self.stored.ndim == 2 else 4
        return self.stored[rows.start // per : rows.stop // per]


def make(values: Tensor, kind: str, seed: int, salt: int) -> Weight | None:
    """`values` [K, N] rounded to what the type stores; MX takes one of its three element types, by the seed."""
    if kind == "NONE":
        return None
    if kind in ("STATIC", "ROW"):
        return Weight(values.to(FP8), values.to(FP8).double())
    if kind != "MX":
        return Weight(pack(values.to(FP8)), values.to(FP8).double())
    element = (FP8, torch.float8_e5m2, torch.uint8)[(seed + salt) % 3]
    if element == torch.uint8:
        codes = (values[..., None] - FLOAT4).abs().argmin(-1).to(torch.uint8)
        elements, stored = FLOAT4[codes.long()], pack(codes)
        stored = stored[..., 0::2] + 16 * stored[..., 1::2]
    else:
        elements, stored = values.to(element).double(), pack(values.to(element))
    generator = torch.Generator().manual_seed(seed + salt)
    scales = torch.randint(120, 123, (len(values) // 32, values.shape[1]), generator=generator, dtype=torch.uint8)
    return Weight(stored, elements * (scales.double() - 127).exp2().repeat_interleave(32, 0), scales)


def pack(elements: Tensor) -> Tensor:
    as_bytes = elements.view(torch.uint8)
    return torch.stack([as_bytes[lane::4] for lane in range(4)], -1).view(elements.dtype)
