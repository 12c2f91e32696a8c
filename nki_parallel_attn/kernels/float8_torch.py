"""Widening float8: torch converts it a value at a time on CPUs, ten times slower than it moves the bytes."""

from __future__ import annotations

import torch
from torch import Tensor

SIGN_AND_SHIFTED_CODE = -0x8000 | 0x07F0
NAN_CODE = 0x7F


def widen(source: Tensor, target: Tensor) -> Tensor:
    """Write float8_e4m3fn `source` into `target`, of the same shape and a wider dtype; exact. Returns `target`."""
    codes = source.view(torch.int8)
    if target.dtype != torch.bfloat16 or target.device.type != "cpu" or _flushes_denormals() or _holds_nan(codes):
        return target.copy_(source)
    # Shifted by the 4 bits that bfloat16 has more below its exponent, a code is its value times 2**(7 - 127), for the
    # exponents' biases; a code without exponent bits is a denormal number both times.
    bits = target.view(torch.int16)
    bits.copy_(codes).bitwise_left_shift_(4).bitwise_and_(SIGN_AND_SHIFTED_CODE)
    return target.mul_(2.0**120)


def _holds_nan(codes: Tensor) -> bool:
    return int((codes & NAN_CODE).amax()) == NAN_CODE


def _flushes_denormals() -> bool:
    """Whether torch.set_flush_denormal(True) is in force."""
    return float(torch.full((), 2.0**-127, dtype=torch.bfloat16) * 2.0**120) == 0.0
