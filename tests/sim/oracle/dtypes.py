"""Exact conversion between NKI's dtypes, in float64.

Source: nki/api/nki.api.shared.rst (formats), nki/api/nki/language/__init__.py (dtype notes), and of nki.isa's page
`dma_copy` (every cast goes through float32) and `range_select` (float overflow gives infinity). Choices where the pages
are silent are listed in docs/simulator_rules.md: float8_e4m3fn overflows to NaN, NaN becomes integer 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FloatFormat:
    """A binary float: `exponent` and `mantissa` bits, largest finite value, and whether it has infinities."""

    exponent: int
    mantissa: int
    largest: float
    has_infinity: bool = True

    @property
    def smallest_exponent(self) -> int:
        """Unbiased exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent - 1)


FLOATS = {
    "float32": FloatFormat(8, 23, float(np.finfo(np.float32).max)),
    "tfloat32": FloatFormat(8, 10, 2.0**127 * (2 - 2.0**-10)),
    "bfloat16": FloatFormat(8, 7, 2.0**127 * (2 - 2.0**-7)),
    "float16": FloatFormat(5, 10, 65504.0),
    "float8_e5m2": FloatFormat(5, 2, 57344.0),
    "float8_e4m3": FloatFormat(4, 3, 240.0),
    "float8_e4m3fn": FloatFormat(4, 3, 448.0, has_infinity=False),
    "float4_e2m1fn": FloatFormat(2, 1, 6.0, has_infinity=False),
}
INTEGERS = {
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint16": (0, 2**16 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
}
# Largest unbiased exponent of an MX element type: isa `quantize_mx`, "Scale calculation".
MX_LARGEST_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}


def round_to(values: ArrayLike, dtype: str) -> Array:
    """What a destination of `dtype` holds: nearest even; integers saturate; floats overflow to infinity or NaN."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = np.asarray(values, np.float64)
    if dtype == "bool_":
        return (x != 0).astype(np.float64)
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        return np.clip(np.rint(np.where(np.isnan(x), 0.0, x)), low, high)
    spec = FLOATS[dtype]
    finite = np.isfinite(x)
    safe = np.where(finite, x, 0.0)
    exponent = np.maximum(np.frexp(safe)[1] - 1, spec.smallest_exponent) - spec.mantissa
    rounded = np.ldexp(np.rint(np.ldexp(safe, -exponent)), exponent)
    overflow = np.where(spec.has_infinity, np.copysign(np.inf, x), np.nan)
    rounded = np.where(np.abs(rounded) > spec.largest, overflow, rounded)
    infinities = x if spec.has_infinity else np.full_like(x, np.nan)
    return np.where(finite, np.copysign(rounded, x), np.where(np.isnan(x), np.nan, infinities))


def convert(values: ArrayLike, source: str, destination: str) -> Array:
    """A cast between dtypes: bit-exact when equal, otherwise source -> float32 -> destination."""
    x = np.asarray(values, np.float64)
    return x if source == destination else round_to(round_to(x, "float32"), destination)


def all_values(dtype: str) -> Array:
    """Every value of an 8-bit or 4-bit float format, in order of its bit pattern (sign bit highest)."""
    spec = FLOATS[dtype]
    bits = np.arange(2 ** (1 + spec.exponent + spec.mantissa))
    sign = np.where(bits >> (spec.exponent + spec.mantissa), -1.0, 1.0)
    exponent = (bits >> spec.mantissa) & (2**spec.exponent - 1)
    fraction = (bits & (2**spec.mantissa - 1)) / 2.0**spec.mantissa
    normal = np.ldexp(1 + fraction, exponent - 1 + spec.smallest_exponent)
    magnitude = np.where(exponent == 0, np.ldexp(fraction, spec.smallest_exponent), normal)
    special = magnitude > spec.largest
    special_value = np.where(spec.has_infinity & (fraction == 0), np.inf, np.nan)
    return sign * np.where(special, special_value, magnitude)


def ulp(values: ArrayLike, dtype: str) -> Array:
    """Spacing of `dtype` at each value: the tolerance for one more rounding. For integers 1."""
    x = np.asarray(values, np.float64)
    if dtype not in FLOATS:
        return np.ones_like(x)
    spec = FLOATS[dtype]
    safe = np.where(np.isfinite(x), x, 1.0)
    return np.ldexp(1.0, np.maximum(np.frexp(safe)[1] - 1, spec.smallest_exponent) - spec.mantissa)
