"""Microscaling (MX) on torch: blocks of 32 along the contraction share a power of two.

A weight's elements are held as NKI packs them, four to a word along the contraction: element q of word p is contraction
row 4 p + q, the first in the lowest bits. The words' bytes, in memory order, are the last dim of a torch tensor:

    float8_e4m3fn_x4, float8_e5m2_x4   [K/4, N, 4] torch.float8_e4m3fn or torch.float8_e5m2
    float4_e2m1fn_x4                   [K/4, N, 2] torch.uint8, byte b holding element 2b in its lower half

so `words` and `from_words` change the view and move nothing. Scales are bytes of float8_e8m0fnu, 2^(byte - 127), 255
being NaN: dense [K/32, N], row i for contraction rows 32 i to 32 i + 31; compact [K/128, N/128], one for each 128 x 128
elements.

Sources: OCP Microscaling Formats (MX) Specification 1.0, formats and special values; nki/api/nki/isa/__init__.py,
quantize_mx (scale rule) and nc_matmul_mx; nki/deep-dives/mxfp-matmul.rst.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
COMPACT_BLOCK = 128
LANES = 4
SCALE_BIAS = 127
SCALE_NAN = 255

FLOAT4_BYTES = torch.uint8
ELEMENT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, FLOAT4_BYTES)
# Exponent of the largest finite element, Emax in quantize_mx.
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_WORD_DTYPE = {torch.float8_e4m3fn: torch.uint32, torch.float8_e5m2: torch.uint32, FLOAT4_BYTES: torch.uint16}
_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Above this scale byte twice a scaled element (at most 57344 = 1.75 * 2^15) may exceed float32; its product may not.
_LAST_IN_FLOAT32 = 238


def quantize_mx(values: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """MXFP8 elements and scales, by the rule of nki.isa.quantize_mx, with blocks along the last dim.

    The scale of a block is 2^(floor(log2 absmax) - (Emax - 1)), Emax = 8 for e4m3fn and 15 for e5m2, and at least
    2^-127, which a block of zeros gets. It is twice that of the OCP specification's example, so no element saturates:
    the largest magnitude lies in [2^(Emax-1), 2^Emax]. NaN stays NaN; infinity becomes NaN in e4m3fn, which has none.

    Args:
        values: [..., K], float16 or bfloat16 (float32 on torch only), K a multiple of 32.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        Elements [..., K] of `dtype`, and scale bytes [..., K/32] uint8.
    """
    blocks = _blocks(values.to(torch.float32).contiguous())
    # The exponent field of the largest magnitude; 0 for zeros and float32 subnormals, whose scale is the least anyway.
    magnitudes = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    scales = ((magnitudes >> 23) - (_LARGEST_EXPONENT[dtype] - 1)).clamp_(min=0)
    inverse = ((2 * SCALE_BIAS - scales) << 23).view(torch.float32)
    scaled = blocks * inverse[..., None]
    if dtype == torch.float8_e4m3fn:
        scaled.masked_fill_(scaled.isinf(), torch.nan)  # torch would saturate
    return scaled.to(dtype).flatten(-2), scales.to(torch.uint8)


def scale_values(scales: Tensor) -> Tensor:
    """Scale bytes (uint8 or float8_e8m0fnu) as float32 powers of two; 255 is NaN."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def expand_compact_scales(scales: Tensor) -> Tensor:
    """Compact scales [K/128, N/128] as dense ones [K/32, N]."""
    per_block = COMPACT_BLOCK // BLOCK
    bytes_ = scales.view(torch.uint8)
    return bytes_.repeat_interleave(per_block, 0).repeat_interleave(COMPACT_BLOCK, 1).view(scales.dtype)


def pack_x4(elements: Tensor) -> Tensor:
    """Elements in contraction order to packed ones.

    Args:
        elements: [K, N], K a multiple of 4: float8_e4m3fn, float8_e5m2, or uint8 codes 0 to 15 of float4_e2m1fn (sign
            bit highest).

    Returns:
        [K/4, N, 4] of the same float8, or [K/4, N, 2] uint8 for float4.
    """
    lanes = elements.view(torch.uint8).reshape(-1, LANES, elements.shape[1]).permute(0, 2, 1)
    if elements.dtype == FLOAT4_BYTES:
        return (lanes[..., 0::2] | lanes[..., 1::2] << 4).contiguous()
    return lanes.contiguous().view(elements.dtype)


def unpack_x4(packed: Tensor) -> Tensor:
    """The inverse of `pack_x4`: [K, N] float8 elements, or uint8 codes of float4."""
    if packed.dtype == FLOAT4_BYTES:
        lanes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    else:
        lanes = packed.view(torch.uint8)
    return lanes.permute(0, 2, 1).flatten(0, 1).view(packed.dtype)


def words(packed: Tensor) -> Tensor:
    """Packed elements as NKI's words [K/4, N], uint32 for float8 and uint16 for float4; a view of contiguous ones."""
    return packed.flatten().view(_WORD_DTYPE[packed.dtype]).view(packed.shape[:2])


def from_words(word: Tensor, dtype: torch.dtype) -> Tensor:
    """NKI's words [K/4, N] as packed elements of `dtype`, one of ELEMENT_DTYPES. A view."""
    return word.unsqueeze(-1).view(dtype)


def decode(packed: Tensor) -> Tensor:
    """Values of packed elements, float32 [K, N], without their scales."""
    elements = unpack_x4(packed)
    if packed.dtype != FLOAT4_BYTES:
        return elements.to(torch.float32)
    values = torch.tensor((*_FLOAT4_VALUES, *(-value for value in _FLOAT4_VALUES)), device=packed.device)
    return values[elements.to(torch.int32)]


def dequantize_mx(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A packed weight as [K, N] of `dtype`: exact in float64, and in float32 while within its range.

    Args:
        scales: dense, [K/32, N] uint8 or float8_e8m0fnu.
    """
    blocks = decode(packed).to(dtype).reshape(-1, BLOCK, packed.shape[1])
    return (blocks * scale_values(scales).to(dtype)[:, None]).flatten(0, 1)


def left_factor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half of what `quantize_mx` leaves of activations [..., K]: their float8_e4m3fn elements times scales, in `dtype`.

    Half, for the largest bfloat16 values round up to 2^128, which float32 has not.
    """
    elements, scales = quantize_mx(values)
    return (_blocks(elements.to(dtype)) * (scale_values(scales).to(dtype) / 2)[..., None]).flatten(-2)


def right_factor(packed: Tensor, scales: Tensor) -> Tensor:
    """Twice a packed weight, [K, N], exact: float32, or float64 where it may exceed float32 though its products do not.

    Args:
        scales: dense, [K/32, N] uint8 or float8_e8m0fnu.
    """
    bytes_ = scales.view(torch.uint8)
    largest = int(bytes_.masked_fill(bytes_ == SCALE_NAN, 0).max())
    return dequantize_mx(packed, scales, torch.float32 if largest <= _LAST_IN_FLOAT32 else torch.float64).mul_(2)


def matmul_mx(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Activations, quantised on the fly to float8_e4m3fn, times a packed weight; products are exact, sums float32.

    Args:
        x: [T, K] float16 or bfloat16, K a multiple of 32.
        packed: [K/4, N, 4] float8 or [K/4, N, 2] uint8.
        scales: dense, [K/32, N] uint8 or float8_e8m0fnu.

    Returns:
        [T, N] float32.
    """
    right = right_factor(packed, scales)
    return (left_factor(x, right.dtype) @ right).to(torch.float32)


def _blocks(values: Tensor) -> Tensor:
    """[..., K] as [..., K/32, 32]."""
    return values.reshape(*values.shape[:-1], -1, BLOCK)
