"""Instructions of the GpSimd Engine. Source: nki/api/nki/isa/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import as_float32
from ..enums import engine
from ..instruction import Call, instruction
from ..ops import as_operator, equal, greater, greater_equal, less, less_equal, not_equal
from ..tensor import NkiTensor

_COMPARISONS = (equal, not_equal, less, less_equal, greater, greater_equal)


def affine_values(
    call: Call, dst: NkiTensor, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int
) -> torch.Tensor:
    """offset + partition * channel_multiplier + sum of index * step over `pattern`, int32, [partitions, elements]."""
    steps = [(int(step), int(num)) for step, num in pattern]
    if not 1 <= len(steps) <= 4 or math.prod(num for _, num in steps) != dst.free_size:
        call.fail(
            "iota-pattern", f"pattern {list(map(list, pattern))} for {dst.free_size} elements per partition of dst"
        )
    line = torch.zeros(1, dtype=torch.int64)
    for step, num in steps:
        line = (line[:, None] + torch.arange(num) * step).reshape(-1)
    channels = torch.arange(dst.shape[0]) * channel_multiplier + offset
    return (channels[:, None] + line[None, :]).to(torch.int32)


@instruction(engine=engine.gpsimd, writes=("dst",))
def iota(
    call: Call,
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> None:
    """dst[p, i] = offset + p * channel_multiplier + value i of the affine `pattern`, int32 cast to dst's dtype."""
    values = affine_values(call, dst, pattern, offset, channel_multiplier)
    if not call.core.computes:
        return
    if dst.dtype.is_integer and dst.dtype.itemsize == 4:
        dst.put_raw(values.to(dst.format.torch))
    else:
        dst.put(values.to(torch.float32))


@instruction(engine=engine.gpsimd, reads=("on_true_tile",), writes=("dst",), elementwise=("on_true_tile", "dst"))
def affine_select(
    call: Call,
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = equal,
    offset: int = 0,
    name: str | None = None,
) -> None:
    """dst[p, i] = on_true_tile[p, i] where `cmp_op(value, 0)`, else on_false_value; value as in iota."""
    compare = as_operator(cmp_op)
    if compare not in _COMPARISONS:
        call.fail("operator", f"cmp_op is {compare!r}, expected a comparison")
    if not isinstance(on_false_value, (int, float)):
        call.fail("scalar-operand", f"on_false_value is {on_false_value!r}, expected a number")
    values = affine_values(call, dst, pattern, offset, channel_multiplier)
    if not call.core.computes:
        return
    mask = compare.compute(values, 0).to(torch.bool).reshape(dst.shape)
    if dst.dtype == on_true_tile.dtype and not dst.dtype.is_float:
        filler = torch.tensor(int(on_false_value)).to(dst.format.torch)
        dst.put_raw(torch.where(mask, on_true_tile.raw.reshape(dst.shape), filler))
    else:
        dst.put(torch.where(mask, on_true_tile.f32().reshape(dst.shape), as_float32(on_false_value)))
