"""Checks that follow from an instruction's declaration: memories, partitions, patterns, dtypes, matching shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .dtypes import float32
from .enums import MemoryRegion, engine, nc_version
from .layout import collapse, repeats

if TYPE_CHECKING:
    from .instruction import Call
    from .tensor import NkiTensor

_SBUF, _PSUM = MemoryRegion.sbuf, MemoryRegion.psum
_READABLE = {
    engine.tensor: (_SBUF,),
    engine.vector: (_SBUF, _PSUM),
    engine.scalar: (_SBUF, _PSUM),
    engine.gpsimd: (_SBUF,),
}
_WRITABLE = {**_READABLE, engine.tensor: (_PSUM,)}
_MAX_PATTERN_DIMS = 5


def check_operand(call: Call, operand: str, tensor: NkiTensor, written: bool) -> None:
    """Check one tensor operand by itself."""
    region = tensor.storage.region
    unit = call.engine
    allowed = (_WRITABLE if written else _READABLE).get(unit)
    if allowed is not None and region not in allowed and operand != "the index":
        verb = "write" if written else "read"
        call.fail("memory-access", f"the {unit.name} engine cannot {verb} {operand} in {region.value}")
    if allowed is None and region is _PSUM:
        call.fail("dma-psum", f"{operand} is in PSUM; copy it to SBUF with tensor_copy first")
    shape = tensor.shape
    if tensor.on_chip:
        partitions = shape[0]
        if partitions > 128:
            call.fail("partition-limit", f"{operand} spans {partitions} partitions, at most 128 are possible")
        if partitions > 1 and tensor.strides[0] != tensor.partition_elements:
            call.fail("partition-stride", f"{operand} skips partitions: pattern {tensor.get_pattern()}")
        if allowed is not None and operand not in call.declaration.any_partition:
            start = tensor.partition
            if start and (start % 32 or partitions > 64 or (partitions > 32 and start % 64)):
                call.fail("start-partition", f"{operand} covers {partitions} partitions from partition {start}")
        if len(shape) > _MAX_PATTERN_DIMS and len(collapse(shape[1:], tensor.strides[1:])) >= _MAX_PATTERN_DIMS:
            call.fail(
                "access-pattern-dims", f"{operand} needs the {len(shape)}-dimensional pattern {tensor.get_pattern()}"
            )
    first = 1 if hasattr(tensor, "index") else 0  # where an index chooses, the first stride says nothing
    if written and repeats(shape[first:], tensor.strides[first:]):
        call.fail("write-overlap", f"{operand} names an element more than once: pattern {tensor.get_pattern()}")
    dtypes = call.declaration.dtypes.get(operand)
    if dtypes is not None and tensor.dtype not in dtypes:
        call.fail("operand-dtype", f"{operand} is {tensor.dtype}, expected one of {', '.join(map(str, dtypes))}")
    if hasattr(tensor, "index"):
        _check_tensor_indirection(call, operand, tensor)


def _check_tensor_indirection(call: Call, operand: str, tensor: NkiTensor) -> None:
    if not tensor.on_chip:
        return
    if not call.core.target.at_least(nc_version.gen4):
        call.fail("target", f"tensor indirection of {operand} needs gen4, the target is {call.core.target.name}")
    if operand not in call.declaration.indirect:
        call.fail("indirect-view", f"{operand} does not take tensor indirection")
    if call.engine is not engine.tensor:
        _check_elementwise_indirection(call, operand, tensor)


def _check_elementwise_indirection(call: Call, operand: str, tensor: NkiTensor) -> None:
    """Where dst and the first input of an instruction of the Vector, Scalar or GpSimd Engine may start."""
    source = call.declaration.indirect[1]
    data = call.argument(source)
    partner: Any
    if operand == source:
        partner = tensor
    elif data.buffer is _SBUF:
        partner = data
    else:
        partner = getattr(data, "offsets", None) or tensor
    check_indirection_start(call, operand, tensor, partner)
    if operand == "dst" and call.engine is engine.scalar and tensor.buffer is _PSUM:
        call.fail("memory-access", "the scalar engine cannot scatter dst in psum")


def check_together(call: Call, bound: list[Any], position: dict[str, int]) -> None:
    """Check operands against each other. Without these the computation has no meaning, so they always run."""
    declaration = call.declaration
    names = declaration.elementwise
    if names:
        first = bound[position[names[0]]]
        if first is None:
            return
        partitions, elements = first.shape[0], first._size
        for name in names[1:]:
            other = bound[position[name]]
            if other is None or not hasattr(other, "storage") or other.shape == first.shape:
                continue
            if other.shape[0] != partitions:
                call.fail("same-partitions", f"{name} has {other.shape[0]} partitions, {names[0]} has {partitions}")
            if other._size != elements:
                call.fail(
                    "same-elements",
                    f"{name} {list(other.shape)} has {other.free_size} elements per partition, "
                    f"{names[0]} {list(first.shape)} has {first.free_size}",
                )
        for name in declaration.vectors:
            vector = bound[position[name]]
            if hasattr(vector, "storage") and (vector._size != partitions or vector.shape[0] != partitions):
                call.fail("vector-operand", f"{name} is {list(vector.shape)}, expected [{partitions}, 1]")
    if declaration.not_both_psum and call.core.checking:
        left, right = (bound[position[name]] for name in declaration.not_both_psum)
        if getattr(left, "buffer", None) is _PSUM and getattr(right, "buffer", None) is _PSUM:
            both = " and ".join(declaration.not_both_psum)
            call.fail("both-in-psum", f"{both} are both in PSUM")


def require_float32(call: Call, operand: str, value: Any) -> None:
    """Demand that a per-partition operand, when it is a tensor, is float32."""
    if hasattr(value, "storage") and value.dtype != float32 and call.core.checking:
        call.fail("operand-dtype", f"{operand} is {value.dtype}, expected float32")


def require_same_partitions(call: Call, **tensors: NkiTensor | None) -> None:
    """Demand that operands whose elements per partition may differ have the same partitions."""
    sizes = {name: tensor.shape[0] for name, tensor in tensors.items() if tensor is not None}
    if len(set(sizes.values())) > 1:
        call.fail("same-partitions", ", ".join(f"{name} has {size} partitions" for name, size in sizes.items()))


def check_indirection_start(call: Call, operand: str, tensor: NkiTensor, partner: NkiTensor) -> None:
    """Start partitions of an operand of tensor indirection, where they were chosen by manual addresses.

    Args:
        tensor: the operand; nothing is checked when it is not indirect.
        partner: the tensor that starts on the partition of the operand's index.
    """
    offsets = getattr(tensor, "offsets", None)
    if offsets is None or offsets.address is None or not call.core.checking:
        return
    start = offsets.partition
    if start % 32:
        call.fail("tensor-indirection-partition", f"the index of {operand} starts at partition {start}")
    if partner.address is not None and partner.partition != start:
        call.fail(
            "tensor-indirection-partition",
            f"the index of {operand} starts at partition {start}, {partner.name} at {partner.partition}",
        )
