"""output_projection_cte in NumPy's float64, from the definitions of the formats; it knows nothing of tiles or cores.

A float8 or MX value is the nearest entry in the list of all values of its format, ties to the even code. Bounds go with
the results: what float32 sums, one rounding of the result and quotients near the middle of two float8 may cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

FLOAT32_UNIT = 2.0**-24
# The kernel multiplies with the float32 reciprocal of a float32 scale: three roundings, and one to spare.
QUOTIENT_ERROR = 4 * FLOAT32_UNIT
OUTPUT_UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The product of two scales is a float32 too; below the least normal one its steps stay as they are there.
SCALE_HALF_STEP = 2.0**-150
LEAST_HALF_STEP = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


def format_values(dtype: str) -> np.ndarray:
    """Finite values of a format of one byte by code, from 0 up."""
    codes = np.arange(128, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    return codes[np.isfinite(codes)]


E4M3, E4M3FN = format_values("float8_e4m3"), format_values("float8_e4m3fn")
E5M2 = format_values("float8_e5m2")
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The nearest of `values` and their negatives, ties to the even index; beyond the last value, the last one."""
    middles = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x)
    below, above = np.searchsorted(middles, magnitude, "left"), np.searchsorted(middles, magnitude, "right")
    index = np.where(below % 2 == 0, below, above)  # they differ on a middle only
    return np.where(np.isnan(x), np.nan, np.copysign(values[index], x))


@dataclass
class Product:
    """attention @ weight, [T, H] float64.

    Attributes:
        magnitude: |attention| @ |weight|, by which float32 sums err.
        ambiguity: what the quotients that may round either way can change, and scales whose product is subnormal.
    """

    value: np.ndarray
    magnitude: np.ndarray
    ambiguity: np.ndarray | float = 0.0


def plain(x: np.ndarray, w: np.ndarray) -> Product:
    """[T, K] times [K, H]."""
    return Product(x @ w, np.abs(x) @ np.abs(w))


def with_float8(
    x: np.ndarray, scale: np.ndarray | float, elements: np.ndarray, columns: np.ndarray | float, values: np.ndarray
) -> Product:
    """x clamped and rounded in units of `scale`, [T, 1] or one number; a weight of elements [K, H] times `columns`."""
    quotient, w = x / scale, elements * columns
    rounded = nearest(quotient, values)
    quantized = rounded * scale
    either = [nearest(quotient * (1 + sign * QUOTIENT_ERROR), values) * scale for sign in (1, -1)]
    product = plain(quantized, w)
    product.ambiguity = np.abs(either[0] - either[1]) @ np.abs(w)
    product.ambiguity += SCALE_HALF_STEP * (np.abs(rounded) @ np.abs(elements))
    return product


def row_scale(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[T, 1]: the largest magnitude becomes the largest float8, but the scale stays a normal float32."""
    return np.maximum(np.abs(x).max(1, keepdims=True) / values[-1], 2.0**-126)


def mx_quantized(x: np.ndarray) -> np.ndarray:
    """x [T, K] through MXFP8 e4m3fn in blocks of 32: exponent floor(log2(absmax)) - 7, at least -127."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(2, keepdims=True)
    exponent = np.frexp(largest)[1] - 1 - 7
    exponent = np.where(largest == 0, -127, np.maximum(exponent, -127))
    scale = np.ldexp(1.0, exponent)
    return (nearest(blocks / scale, E4M3FN) * scale).reshape(x.shape)


def mx_weight(elements: np.ndarray, scale_bytes: np.ndarray) -> np.ndarray:
    """[K, H] from element values and E8M0 bytes, [K/32, H] or compact [K/128, H/128]."""
    rows, columns = (size // scales for size, scales in zip(elements.shape, scale_bytes.shape, strict=True))
    factors = np.where(scale_bytes == 255, np.nan, np.ldexp(1.0, scale_bytes.astype(np.int64) - 127))
    return elements * factors.repeat(rows, 0).repeat(columns, 1)


def bound(product: Product, bias: np.ndarray | float, contraction: int, dtype: str) -> np.ndarray:
    """Largest allowed deviation from product + bias, element by element.

    Sums of K products err by K units of float32, dequantisation and bias by four more; half a step of the result.
    """
    result = np.abs(product.value + bias)
    sums = (contraction + 4) * FLOAT32_UNIT * (product.magnitude + np.abs(bias)) + product.ambiguity
    return sums + OUTPUT_UNIT[dtype] * (result + sums) + LEAST_HALF_STEP[dtype]
