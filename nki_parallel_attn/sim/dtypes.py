"""NKI data types: how each is stored, and the documented conversions to and from float32.

Conversions round to nearest, ties to even (about-neuron/arch/neuron-features/rounding-modes.rst). Float overflow
follows each format: infinity where it has one (float16, bfloat16, float8_e5m2, float8_e4m3), NaN in float8_e4m3fn,
which has none; these are the conversions of ml_dtypes, in which the vendor's simulator stores low-precision tensors
(nki/guides/nki_simulator.rst). Float to integer rounds to nearest even and saturates; NaN becomes 0. Every conversion
between different dtypes goes through float32 (nki.isa.dma_copy, nki.isa.tensor_copy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .core import fail

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Format:
    """How elements are held in memory.

    Attributes:
        torch: dtype of the storage.
        decode: storage to float32.
        encode: float32 to storage, with the format's rounding.
        poison: what fresh memory holds: NaN for floats, 4 for integers (nki/guides/nki_simulator.rst).
        cast: encoding is what torch does when it copies float32 into the storage.
    """

    torch: torch.dtype
    decode: Convert
    encode: Convert
    poison: float | int
    cast: bool = False


class DType(str):
    """A dtype of nki.language: a string, as documented, that knows its formats.

    Attributes:
        itemsize: bytes of one element on the device.
        kind: "float", "integer", "bool" or "packed".
        precise: format that holds the dtype bit for bit.
        wide: format under NKI_PRECISE_FP=0: float32 for every float of lower precision.
    """

    itemsize: int
    kind: str
    precise: Format
    wide: Format

    def __new__(cls, name: str, itemsize: int, kind: str, precise: Format, wide: Format | None = None) -> DType:
        self = super().__new__(cls, name)
        self.itemsize = itemsize
        self.kind = kind
        self.precise = precise
        self.wide = wide or precise
        return self

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return f"nl.{self}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (as_dtype, (str(self),))

    @property
    def is_float(self) -> bool:
        """Whether it is an unpacked floating-point type."""
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer type; bool_ counts, being stored as uint8."""
        return self.kind in ("integer", "bool")


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


def _to_float32(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32)


def _encode_integer(dtype: torch.dtype) -> Convert:
    info = torch.iinfo(dtype)
    low, high = info.min, info.max

    def encode(values: torch.Tensor) -> torch.Tensor:
        # float64 holds every bound exactly; float32 would round 2**31 - 1 up and overflow the cast.
        rounded = values.round().to(torch.float64).nan_to_num_(0.0).clamp_(low, high)
        return rounded.to(torch.int64).to(dtype)

    return encode


def _encode_tfloat32(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


# float8_e4m3 has infinity where float8_e4m3fn has 256, and NaN above; all smaller values share their bits.
def _decode_float8_e4m3(values: torch.Tensor) -> torch.Tensor:
    result = values.to(torch.float32)
    magnitude = result.abs()
    if bool((magnitude >= 256).any()):
        result = torch.where(magnitude == 256, result * float("inf"), result)
        result = torch.where((magnitude > 256), float("nan"), result)
    return result


def _encode_float8_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-256.0, 256.0).to(torch.float8_e4m3fn)


def _encode_float8_e4m3fn(values: torch.Tensor) -> torch.Tensor:
    # 464 is the last value that rounds to 448; torch would saturate above it. Looking first is cheap, choosing is not.
    if values.numel() and not float(values.abs().amax()) <= 464.0:
        values = torch.where(values.abs() > 464.0, float("nan"), values)
    return values.to(torch.float8_e4m3fn)


def _encode_float8_e8m0(values: torch.Tensor) -> torch.Tensor:
    exponent = values.log2().round().clamp(-127, 127)
    bits = torch.where((values > 0) & values.isfinite(), exponent + 127, 255.0)
    return bits.to(torch.uint8).view(torch.float8_e8m0fnu)


def _encode_bool(values: torch.Tensor) -> torch.Tensor:
    return (values != 0).to(torch.uint8)


def _packed(values: torch.Tensor) -> torch.Tensor:
    fail("operand-dtype", "packed x4 elements have no value; moves, quantize_mx and nc_matmul_mx take them")


_NAN = float("nan")


def _float_format(dtype: torch.dtype, encode: Convert | None = None, decode: Convert = _to_float32) -> Format:
    return Format(dtype, decode, encode or (lambda values: values.to(dtype)), _NAN, cast=encode is None)


def _integer(name: str, dtype: torch.dtype) -> DType:
    return DType(name, dtype.itemsize, "integer", Format(dtype, _to_float32, _encode_integer(dtype), 4))


FLOAT32 = Format(torch.float32, _identity, _identity, _NAN, cast=True)

bool_ = DType("bool_", 1, "bool", Format(torch.uint8, _to_float32, _encode_bool, 4))
int8 = _integer("int8", torch.int8)
int16 = _integer("int16", torch.int16)
int32 = _integer("int32", torch.int32)
uint8 = _integer("uint8", torch.uint8)
uint16 = _integer("uint16", torch.uint16)
uint32 = _integer("uint32", torch.uint32)
float16 = DType("float16", 2, "float", _float_format(torch.float16), FLOAT32)
float32 = DType("float32", 4, "float", FLOAT32)
bfloat16 = DType("bfloat16", 2, "float", _float_format(torch.bfloat16), FLOAT32)
tfloat32 = DType("tfloat32", 4, "float", Format(torch.float32, _identity, _encode_tfloat32, _NAN), FLOAT32)
float8_e4m3 = DType(
    "float8_e4m3", 1, "float", _float_format(torch.float8_e4m3fn, _encode_float8_e4m3, _decode_float8_e4m3), FLOAT32
)
float8_e4m3fn = DType("float8_e4m3fn", 1, "float", _float_format(torch.float8_e4m3fn, _encode_float8_e4m3fn), FLOAT32)
float8_e5m2 = DType("float8_e5m2", 1, "float", _float_format(torch.float8_e5m2), FLOAT32)
float8_e8m0fnu = DType("float8_e8m0fnu", 1, "float", _float_format(torch.float8_e8m0fnu, _encode_float8_e8m0))
float8_e5m2_x4 = DType("float8_e5m2_x4", 4, "packed", Format(torch.int32, _packed, _packed, 0x7F7F7F7F))
float8_e4m3fn_x4 = DType("float8_e4m3fn_x4", 4, "packed", Format(torch.int32, _packed, _packed, 0x7F7F7F7F))
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4", 2, "packed", Format(torch.int16, _packed, _packed, 4))

ALL: tuple[DType, ...] = (
    bool_, int8, int16, int32, uint8, uint16, uint32, float16, float32, bfloat16, tfloat32, float8_e4m3, float8_e4m3fn,
    float8_e5m2, float8_e8m0fnu, float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4,
)  # fmt: skip
FLOAT8 = (float8_e4m3, float8_e4m3fn, float8_e5m2)
PACKED = (float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4)

_BY_NAME = {str(dtype): dtype for dtype in ALL} | {"bool": bool_}
_BY_TORCH = {
    torch.bool: bool_, torch.int8: int8, torch.int16: int16, torch.int32: int32, torch.uint8: uint8,
    torch.uint16: uint16, torch.uint32: uint32, torch.float16: float16, torch.float32: float32,
    torch.bfloat16: bfloat16, torch.float8_e4m3fn: float8_e4m3fn, torch.float8_e5m2: float8_e5m2,
    torch.float8_e8m0fnu: float8_e8m0fnu,
}  # fmt: skip


def as_float32(value: float) -> float:
    """A Python number as float32 holds it; torch refuses numbers that round to the largest float32."""
    if -3.4e38 < value < 3.4e38:
        return value
    with np.errstate(over="ignore"):
        return float(np.float32(value))


# torch has no index_select, comparison or arithmetic for these; moves go through integers of the same size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """An integer dtype of the same size that supports every torch operation on bit patterns."""
    return _BITS[dtype.itemsize]


def as_dtype(value: Any) -> DType:
    """The NKI dtype that `value` names: an NKI dtype or its name, a torch dtype, a NumPy or ml_dtypes dtype.

    Raises:
        TypeError: it names none.
    """
    if type(value) is DType:
        return value
    if isinstance(value, torch.dtype):
        found = _BY_TORCH.get(value)
    elif isinstance(value, str):
        found = _BY_NAME.get(value)
    else:
        try:
            found = _BY_NAME.get(np.dtype(value).name)
        except (TypeError, ValueError):
            found = None
    if found is None:
        raise TypeError(f"{value!r} is not a dtype of nki.language")
    return found


def kernel_dtype(value: Any) -> DType:
    """The NKI dtype that a kernel names.

    Raises:
        NkiValidationError: it names none.
    """
    if type(value) is DType:
        return value
    try:
        return as_dtype(value)
    except TypeError as error:
        fail("tensor-dtype", str(error))
