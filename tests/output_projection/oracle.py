"""float64 evaluation of the low-precision formats and of the quantised products, in NumPy, from their definitions.

Formats: OCP 8-bit Floating Point Specification (E4M3), IEEE-style e4m3 with infinity for NKI's float8_e4m3, OCP
Microscaling Formats (MX) Specification 1.0 (E8M0, E2M1); scale rule: nki/api/nki/isa/__init__.py, quantize_mx.
Nothing here uses the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Element:
    """A float of `exponent` and `mantissa` bits; `largest` finite value, and Emax, the exponent of that."""

    exponent: int
    mantissa: int
    largest: float
    has_infinity: bool

    @property
    def emax(self) -> int:
        return int(np.floor(np.log2(self.largest)))

    def values(self) -> Array:
        """The value of every code, in order; the sign is the highest bit."""
        bias = 2 ** (self.exponent - 1) - 1
        values = []
        for code in range(2 ** (1 + self.exponent + self.mantissa)):
            fraction = (code & (2**self.mantissa - 1)) / 2**self.mantissa
            power = (code >> self.mantissa) & (2**self.exponent - 1)
            value = (1 + fraction) * 2.0 ** (power - bias) if power else fraction * 2.0 ** (1 - bias)
            if value > self.largest:
                value = np.inf if self.has_infinity and fraction == 0 else np.nan
            values.append(-value if code >> (self.exponent + self.mantissa) else value)
        return np.array(values)


E4M3 = Element(4, 3, 240.0, True)
E4M3FN = Element(4, 3, 448.0, False)
E5M2 = Element(5, 2, 57344.0, True)
E2M1 = Element(2, 1, 6.0, False)


def nearest(x: Array, element: Element) -> Array:
    """The finite code value nearest to each x, of two as near the one with an even code; x within the finite range."""
    table = element.values()
    half = len(table) // 2
    grid = table[:half][np.isfinite(table[:half])]
    magnitude = np.abs(x)
    above = np.searchsorted(grid, magnitude).clip(0, len(grid) - 1)
    below = np.maximum(above - 1, 0)
    up, down = grid[above] - magnitude, magnitude - grid[below]
    index = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(grid[index], x)


def saturated(x: Array, element: Element) -> Array:
    """Clamped to the finite range and rounded."""
    return nearest(np.clip(x, -element.largest, element.largest), element)


def quantized_rows(x: Array, element: Element) -> tuple[Array, Array]:
    """Elements [T, K] and scales [T, 1]; the scale and the quotient are float32 numbers."""
    absmax = np.abs(x).max(1, keepdims=True).astype(np.float32)
    scale = np.maximum(absmax / np.float32(element.largest), np.float32(2.0**-126))
    return saturated((x.astype(np.float32) / scale).astype(np.float64), element), scale.astype(np.float64)


def quantized_static(x: Array, scale: float, element: Element) -> Array:
    quotient = x.astype(np.float32) / np.float32(scale)
    return saturated(quotient.astype(np.float64), element)


def mx_scale_bytes(x: Array, element: Element) -> NDArray[np.int64]:
    """[T, K] to [T, K/32]: 127 + floor(log2 absmax) - (Emax - 1), at least 0, which zeros get."""
    absmax = np.abs(x).reshape(len(x), -1, 32).max(2)
    exponent = np.frexp(absmax)[1] - 1  # frexp is in [0.5, 1)
    return np.where(absmax == 0, 0, np.maximum(127 + exponent - (element.emax - 1), 0))


def mx_dequantized(x: Array, element: Element) -> Array:
    """[T, K] after quantisation in blocks of 32 along K."""
    scale = np.repeat(2.0 ** (mx_scale_bytes(x, element) - 127.0), 32, axis=1)
    return nearest(x / scale, element) * scale


def mx_weight(codes: NDArray[np.uint8], scale_bytes: NDArray[np.uint8], element: Element) -> Array:
    """Codes [K, N] and dense scale bytes [K/32, N] to values [K, N]; byte 255 is NaN."""
    scale = np.where(scale_bytes == 255, np.nan, 2.0 ** (scale_bytes.astype(np.float64) - 127))
    return element.values()[codes] * np.repeat(scale, 32, axis=0)
