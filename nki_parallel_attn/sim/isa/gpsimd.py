"""Instructions of the GpSimd Engine. Source: nki/api/nki/isa/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import as_float32, float32, int32
from ..enums import engine, nc_version
from ..instruction import Call, instruction
from ..operand_checks import require_same_partitions
from ..ops import (
    add,
    as_operator,
    average,
    bitwise_and,
    bitwise_or,
    equal,
    maximum,
)
from ..tensor import NkiTensor
from .alu import COMPARISONS, check_bitvec, constant, flat, put_bits, unsigned

PARTITIONS_PER_CORE = 16


def affine_steps(call: Call, dst: NkiTensor, pattern: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """`pattern` as (step, number) pairs, checked against dst."""
    steps = [(step, num) for step, num in pattern]
    if not 1 <= len(steps) <= 4 or math.prod(num for _, num in steps) != dst.free_size:
        call.fail(
            "iota-pattern", f"pattern {list(map(list, pattern))} for {dst.free_size} elements per partition of dst"
        )
    return steps


def affine_values(
    dst: NkiTensor, steps: Sequence[tuple[int, int]], offset: int, channel_multiplier: int
) -> torch.Tensor:
    """offset + partition * channel_multiplier + sum of index * step over `steps`, int32, [partitions, elements]."""
    line = torch.zeros(1, dtype=torch.int64)
    for step, num in steps:
        line = (line[:, None] + torch.arange(num) * step).reshape(-1)
    channels = torch.arange(dst.shape[0]) * channel_multiplier + offset
    return channels.to(torch.int32)[:, None] + line.to(torch.int32)


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
    steps = affine_steps(call, dst, pattern)
    if not call.core.computes:
        return
    values = affine_values(dst, steps, offset, channel_multiplier)
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
    compare = COMPARISONS.get(as_operator(cmp_op))
    if compare is None:
        call.fail("operator", f"cmp_op is {cmp_op!r}, expected a comparison")
    steps = affine_steps(call, dst, pattern)
    if not call.core.computes:
        return
    values = affine_values(dst, steps, offset, channel_multiplier)
    mask = compare(values, 0).reshape(dst.shape)
    if dst.dtype == on_true_tile.dtype and not dst.dtype.is_float:
        dst.put_raw(torch.where(mask, on_true_tile.raw.reshape(dst.shape), constant(dst, on_false_value)))
    else:
        dst.put(torch.where(mask, on_true_tile.f32().reshape(dst.shape), as_float32(on_false_value)))


_PARTITION_REDUCERS = (add, average, maximum, bitwise_or, bitwise_and)


@instruction(engine=engine.gpsimd, reads=("data",), writes=("dst",))
def tensor_partition_reduce(call: Call, dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None) -> None:
    """dst, of one partition, = data reduced over its partitions, in float32; bitvec operators reduce integers' bits.

    Args:
        op: nl.add, nl.average, nl.maximum, nl.bitwise_or or nl.bitwise_and.
    """
    operator = as_operator(op)
    if operator not in _PARTITION_REDUCERS:
        call.fail("operator", f"{operator!r}, expected add, average, maximum, bitwise_or or bitwise_and")
    check_bitvec(call, operator, dst=dst, data=data)
    if dst.shape[0] != 1:
        call.fail("same-partitions", f"dst has {dst.shape[0]} partitions, expected 1")
    if dst.size != data.free_size:
        call.fail("same-elements", f"dst has {dst.size} elements, data has {data.free_size} per partition")
    if not call.core.computes:
        return
    assert operator.reduce is not None
    if operator.is_bitvec:
        put_bits(dst, operator.reduce(unsigned(data).reshape(data.shape[0], -1).t()))
    else:
        dst.put(operator.reduce(flat(data).t()))


@instruction(
    engine=engine.gpsimd,
    reads=("segment_ids",),
    writes=("dst",),
    dtypes={"segment_ids": (float32, int32), "dst": (float32, int32)},
)
def sequence_bounds(call: Call, dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> None:
    """dst [1, 2, n] = first position, and position after the last, of the run of equal ids each element is in.

    Elements of id 0 are padding and get n and -1.

    Args:
        segment_ids: [1, n], non-negative.
    """
    n = segment_ids.free_size
    if segment_ids.shape[0] != 1 or dst.shape != (1, 2, n):
        call.fail("sequence-bounds-shape", f"segment_ids is {list(segment_ids.shape)}, dst {list(dst.shape)}")
    if not call.core.computes:
        return
    ids = segment_ids.raw.reshape(-1)
    position = torch.arange(n)
    changes = ids[1:] != ids[:-1]
    first, last = torch.ones(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool)
    first[1:], last[:-1] = changes, changes
    starts = torch.where(first, position, 0).cummax(0).values
    ends = torch.where(last, position + 1, n).flip(0).cummin(0).values.flip(0)
    padding = ids == 0
    bounds = torch.stack((torch.where(padding, n, starts), torch.where(padding, -1, ends)))
    dst.put_raw(bounds.to(dst.format.torch))


@instruction(
    engine=engine.gpsimd,
    reads=("src",),
    writes=("dst",),
    dtypes={"src": (float32, int32), "dst": (int32,)},
    deferred_read=True,
)
def nonzero_with_count(
    call: Call,
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: int = 0,
    padding_val: int = -1,
    name: str | None = None,
) -> None:
    """In partitions 0, 16, ... of dst: positions of src's nonzero elements, padding, and in the last place their count.

    The other partitions of src are not read and those of dst not written.

    Args:
        dst: int32, one element per partition more than src.
        index_offset: added to the positions.
    """
    call.require_target(nc_version.gen3, "nonzero_with_count")
    require_same_partitions(call, src=src, dst=dst)
    if dst.free_size != src.free_size + 1:
        call.fail(
            "nonzero-size", f"dst has {dst.free_size} elements per partition, src {src.free_size}; expected one more"
        )
    for label, value in (("index_offset", index_offset), ("padding_val", padding_val)):
        if not -(2**31) <= value < 2**31:
            call.fail("scalar-operand", f"{label} is {value!r}, expected a 32-bit integer")
    src, dst = _first_of_each_core(src), _first_of_each_core(dst)
    if call.core.checks.uninitialised:
        call.check_written("src", src)
    if call.core.computes:
        found = src.raw.reshape(src.shape[0], -1) != 0
        elements = found.shape[1]
        positions = torch.where(found, torch.arange(elements), elements).sort(1).values
        indices = torch.where(positions < elements, positions + index_offset, padding_val)
        dst.put_raw(torch.cat((indices, found.sum(1, keepdim=True)), 1).to(torch.int32))
    dst.mark_written()
    call.marked = True


def _first_of_each_core(tensor: NkiTensor) -> NkiTensor:
    """Partitions 0, 16, ... of a tensor: the first of those that each GpSimd core is connected to."""
    partitions = -(-tensor.shape[0] // PARTITIONS_PER_CORE)
    strides = (tensor.strides[0] * PARTITIONS_PER_CORE, *tensor.strides[1:])
    return tensor._derive((partitions, *tensor.shape[1:]), strides, tensor.offset)
