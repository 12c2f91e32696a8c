"""float8 quantisation with one scale per tensor (STATIC) or per row (ROW), and which float8 is meant.

NKI has two formats with 4 exponent and 3 mantissa bits. float8_e4m3fn ends at 448 and has no infinity; float8_e4m3 ends
at 240 and has infinity and NaN where the other has 256 to 448. Every finite value of float8_e4m3 has the same byte in
both, so torch.float8_e4m3fn carries either, and what differs is where values are clamped. Microscaling is in
microscaling_torch.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.topology.types import DtypeMode

FP8 = torch.float8_e4m3fn
FLOAT8_E4M3_MAX = 240.0
FLOAT8_E4M3FN_MAX = 448.0
# The byte of 240, without its sign; beyond it float8_e4m3 has infinity and NaN.
_BYTE_OF_240 = 0x77
_BYTE_OF_NAN = 0x7F


def fp8_max(mode: DtypeMode, target: str) -> float:
    """Largest finite value of the float8 that `mode` means on "trn2" or "trn3": 240 or 448."""
    ocp = mode is DtypeMode.OCP or (mode is DtypeMode.AUTO and target == "trn3")
    return FLOAT8_E4M3FN_MAX if ocp else FLOAT8_E4M3_MAX


def to_fp8(values: Tensor, maximum: float) -> Tensor:
    """Clamped to +-maximum and rounded to the nearest float8, ties to even.

    Infinity becomes the maximum; NaN stays NaN. Values up to 2^-10 become 0, the least positive float8 is 2^-9.

    Args:
        values: float32 or float64; 16-bit values are exact in float32, quotients of them are not in 16 bits.
        maximum: `fp8_max`.
    """
    return values.clamp(-maximum, maximum).to(FP8)


def quantize_static(values: Tensor, scale: Tensor, maximum: float) -> Tensor:
    """values / scale as float8, of the same shape. The division is float32 (float64 for float64 values).

    Args:
        values: any float dtype.
        scale: one element, positive: what a float8 of 1 stands for.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return to_fp8(wide / scale.reshape(()).to(wide.dtype), maximum)


def quantize_rows(values: Tensor, maximum: float) -> tuple[Tensor, Tensor]:
    """Each row by its own largest magnitude, which becomes the maximum.

    scale = max(absmax / maximum, 2^-126) and element = values / scale, both in float32 (float64 for float64 values).
    The floor is the least normal float32: rows of zeros stay zeros without a case of their own. A row that holds NaN or
    infinity comes out with NaN, and no other row does.

    Args:
        values: [..., K], any float dtype.

    Returns:
        float8 [..., K], and its scales [..., 1], float32 (float64 for float64 values).
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    scale = (wide.abs().amax(-1, keepdim=True) / maximum).clamp_(min=torch.finfo(torch.float32).tiny)
    return to_fp8(wide / scale, maximum), scale


def exceeds(elements: Tensor, maximum: float) -> bool:
    """Whether float8_e4m3fn `elements` hold a number beyond `maximum`, which float8_e4m3 reads as infinity or NaN."""
    if maximum != FLOAT8_E4M3_MAX:
        return False
    magnitudes = elements.view(torch.uint8) & _BYTE_OF_NAN
    return bool(((magnitudes > _BYTE_OF_240) & (magnitudes < _BYTE_OF_NAN)).any())
